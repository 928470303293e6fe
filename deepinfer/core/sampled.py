"""What is drawn in a step, and for whom."""

from dataclasses import dataclass

from torch import Tensor


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
class Sampled:
    """The tokens of a step's sampled rows, in the plan's order: int64 [S], still on the device."""

    tokens: Tensor
