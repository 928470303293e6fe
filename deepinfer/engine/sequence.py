"""The growing state of one running request."""

from collections.abc import Collection
from dataclasses import dataclass, field

from deepinfer.core.outputs import FinishReason
from deepinfer.core.request import Request


@dataclass
class Sequence:
    """A request and what it has generated; only `append` changes it.

    replay_start: first position of the decoder half, fixed at admission.
    stop_tokens: token ids that end it.
    max_new_tokens: most tokens to generate, what the context has room for already taken into account.
    """

    request: Request
    replay_start: int
    stop_tokens: Collection[int]
    max_new_tokens: int
    generated: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    @property
    def length(self) -> int:
        """Prompt tokens plus generated tokens: also the position of the next token."""
        return len(self.request.token_ids) + len(self.generated)

    def append(self, token: int) -> None:
        """Take the next token and settle whether the sequence ends with it."""
        self.generated.append(token)
        if token in self.stop_tokens:
            self.finish_reason = "stop"
        elif len(self.generated) == self.max_new_tokens:
            self.finish_reason = "length"
