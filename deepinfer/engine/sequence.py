"""The growing state of one running request."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from deepinfer.core.outputs import FinishReason, TokenLogprobs
from deepinfer.core.request import Request
from deepinfer.engine.stops import StopStrings


@dataclass
class Sequence:
    """A request and what it has generated; only its methods change it.

    replay_start: first position of the decoder half, fixed at admission.
    stop_tokens: token ids that end it. eos: the one of them that is no reason to be told.
    max_new_tokens: most tokens to generate, what the context has room for already taken into account.
    stops: watches for its stop strings; None: it has none.
    stop_reason: the stop string or the stop token that ended it.
    logprobs: of its tokens, if it asked for them; they arrive with the tokens or right after.
    prompt_logprobs: position -> of the prompt's token there, as far as they came.
    """

    request: Request
    replay_start: int
    stop_tokens: Collection[int]
    max_new_tokens: int
    eos: int | None = None
    stops: StopStrings | None = None
    generated: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)

    @property
    def length(self) -> int:
        """Prompt tokens plus generated tokens: also the position of the next token."""
        return len(self.request.token_ids) + len(self.generated)

    def append(self, token: int) -> None:
        """Take the next token and settle whether the sequence ends with it."""
        self.generated.append(token)
        enough = len(self.generated) >= self.request.params.min_tokens
        if token in self.stop_tokens:
            self.finish_reason = "stop"
            self.stop_reason = None if token == self.eos else token
        elif self.stops is not None and self.stops.push(token, enough):
            self.finish_reason, self.stop_reason = "stop", self.stops.matched
        elif len(self.generated) == self.max_new_tokens:
            self.finish_reason = "length"

    def take_logprobs(self, found: Iterable[TokenLogprobs]) -> None:
        """Take the log-probabilities of the newest tokens, in their order; of those behind the end there are more."""
        self.logprobs.extend(found)
        del self.logprobs[len(self.generated) :]
