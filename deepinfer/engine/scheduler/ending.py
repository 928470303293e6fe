"""When requests end: the rules that hold for all, applied to one."""

from dataclasses import dataclass

from deepinfer.core.errors import RequestError
from deepinfer.core.request import Request
from deepinfer.engine.sequence import Sequence
from deepinfer.engine.stops import StopStrings, StopStringsOf


def _no_stop_strings(request: Request) -> StopStrings | None:
    """For requests without any: RequestError for others."""
    if request.params.stop:
        raise RequestError("stop strings take a tokenizer, and this engine was built without one")
    return None


@dataclass(frozen=True)
class EndRules:
    """Model-wide ends.

    eos_token_id: ends a request unless it ignores it.
    context: most tokens of prompt and reply together.
    stop_strings: makes what watches for a request's stop strings.
    """

    eos_token_id: int
    context: int
    stop_strings: StopStringsOf = _no_stop_strings

    def sequence(self, request: Request, replay_start: int, capacity: int) -> Sequence:
        """Return the request's sequence; `capacity` is how many tokens' KV there is room for.

        The reply may end with a token whose KV is never needed, so it can be one longer than `capacity` leaves.
        RequestError for a prompt that leaves no room for a reply.
        """
        length, params = len(request.token_ids), request.params
        most = min(capacity, self.context - 1)
        if not 1 <= length <= most:
            limit = f"cache of {capacity} tokens" if capacity < self.context else f"context of {self.context} tokens"
            raise RequestError(f"the prompt has {length} tokens; the {limit} takes a prompt of 1 to {most}")
        stops = set(params.stop_token_ids)
        if not params.ignore_eos:
            stops.add(self.eos_token_id)
        room = min(self.context - length, capacity + 1 - length)
        most_new = room if params.max_tokens is None else min(room, params.max_tokens)
        return Sequence(request, replay_start, stops, most_new, self.eos_token_id, self.stop_strings(request))
