"""What is drawn in a step, and for whom."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

from torch import Tensor

from deepinfer.core.outputs import TokenLogprobs


@dataclass(frozen=True, slots=True)
class SampledRow:
    """One row of logits that gives a token.

    slot: the request's slot in this step. position: of the token to be drawn, counted from the request's first token.
    """

    request_id: int
    slot: int
    position: int


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Which tokens the grammars of C rows allow; the other rows of the step are free.

    rows: int64 [C], their places among the step's sampled rows, ascending.
    bits: int32 [C, ceil(vocab / 32)]; bit t % 32 of word t // 32 says whether token t may come.
    """

    rows: Tensor
    bits: Tensor


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities of R tokens and of the most probable ones in their places, still on the device.

    tops: how many of those each row asked for. chosen: FP64 [R]. top: FP64 [R, K], highest first, and ids: int64
    [R, K], for the largest of `tops` or the vocabulary, if that is smaller.
    """

    tops: tuple[int, ...]
    chosen: Tensor
    top: Tensor
    ids: Tensor

    def to_host(self) -> list[TokenLogprobs]:
        """One a row; waits for the device."""
        found = []
        rows = zip(self.tops, self.chosen.tolist(), self.ids.tolist(), self.top.tolist(), strict=True)
        for count, chosen, ids, top in rows:
            best = zip(ids[:count], top, strict=False)
            found.append(TokenLogprobs(chosen, {token: value for token, value in best if value > -inf}))
        return found


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of a request's prompt tokens at positions `first`, `first` + 1, ..."""

    request_id: int
    first: int
    logprobs: Logprobs


@dataclass(frozen=True, slots=True)
class Sampled:
    """The tokens of a step's sampled rows, in the plan's order: int64 [S], still on the device; -1: none was allowed.

    logprobs: those of the rows with the places `logprob_rows`, ascending, that asked for them.
    prompts: those of prompt tokens that rows of this step come before.
    failures: requests whose images could not be encoded, and why; what the step computed for them means nothing.
    """

    tokens: Tensor
    logprob_rows: tuple[int, ...] = ()
    logprobs: Logprobs | None = None
    prompts: tuple[PromptLogprobs, ...] = ()
    failures: Mapping[int, Exception] = field(default_factory=dict)
