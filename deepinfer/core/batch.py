"""One step of the model as device tensors.

The rows of a half of the model lie in groups: stretches (consecutive rows of one slot) of equal length, one after
another. So a group is a dense [stretches, rows, ...] view of any tensor of rows, and nothing is done row by row.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

Gather = Callable[[Tensor], Tensor]
"""Gives every rank of a group what all of them have: this rank's rows [n, ...] -> those of the whole step [N, ...]."""


@dataclass(frozen=True, slots=True)
class Group:
    """G stretches of n rows each: the rows `start` to `start + G * n` of their half.

    slots: int64 [G]. firsts: int64 [G], positions of the stretches' first rows.
    floors: int64 [G]; windows hold nothing of this request before this position.
    ends: G positions after the stretches' last rows, on the host.
    """

    start: int
    count: int
    slots: Tensor
    firsts: Tensor
    floors: Tensor
    ends: tuple[int, ...]

    @property
    def longest(self) -> int:
        """Tokens of the longest of the requests, the last rows included."""
        return max(self.ends)

    def view(self, rows: Tensor) -> Tensor:
        """This group's part of rows [M, ...] as [G, n, ...]."""
        stretches = len(self.ends)
        return rows[self.start : self.start + stretches * self.count].view(stretches, self.count, *rows.shape[1:])


@dataclass(frozen=True, slots=True)
class Half:
    """The M rows that run one half of the model.

    positions, slots: int64 [M]. lowest: int64 [M]; a row's window holds no key before this position.
    """

    groups: tuple[Group, ...]
    positions: Tensor
    slots: Tensor
    lowest: Tensor


@dataclass(frozen=True, slots=True)
class Pairs:
    """How the pooling of ratio-2 sources pairs rows up; N counts the rows of the encoder half.

    rows: int64 [W], the odd rows that complete an entry which is to be written.
    partners: int64 [W], the even row before each: a row of this step, or N + z for the z-th pending one.
    pending_slots, pending_positions: int64 [Z], the even tokens of earlier steps that complete now.
    kept: int64 [Y], the even rows whose values and scores a later step may need.
    """

    rows: Tensor
    partners: Tensor
    pending_slots: Tensor
    pending_positions: Tensor
    kept: Tensor


@dataclass(frozen=True, slots=True)
class Pictures:
    """What a step knows of images; a step without image tokens has none.

    types: int64 [N], -1 text, 0 start, 1 image, 2 newline, 3 end.
    cells: [C, hidden], embeddings of the step's image tokens. rows: int64 [C], the rows they stand in.
    """

    types: Tensor
    cells: Tensor
    rows: Tensor


@dataclass(frozen=True, slots=True)
class Recalled:
    """Tokens before a request's first row that only the host knows, for Engram: int64 [Z] each."""

    slots: Tensor
    positions: Tensor
    ids: Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """One step. N rows run the encoder half, M of them the decoder half, S of those give a next token.

    ids: int64 [N], in the order of the encoder half, as everything over N rows.
    decoder_rows: int64 [M], the decoder half's rows among the N. sample_rows: int64 [S], among the M, in the order of
        the plan's sampling spans.
    scored_rows: int64 [P], among the M: rows of prompts whose next tokens' log-probabilities are asked for.
    singles: int64 [W], the rows whose entry at ratio-1 sources is to be written. pairs: the same for ratio 2.
    pictures, recalled, scored_rows: None where the step has none.
    shared: what ranks do that share the encoder half's rows; the batch is then one rank's, see there. None: no sharing.
    """

    ids: Tensor
    encoder: Half
    decoder: Half
    decoder_rows: Tensor
    sample_rows: Tensor
    singles: Tensor
    pairs: Pairs
    pictures: Pictures | None = None
    recalled: Recalled | None = None
    scored_rows: Tensor | None = None
    shared: "Shared | None" = None


@dataclass(frozen=True, slots=True)
class Shared:
    """A step whose encoder half the ranks of a group share: each runs n of the N rows, and all keep what they leave.

    In a batch with one, all that is about N rows is about this rank's n. The decoder half is run whole by every rank,
    from rows that are gathered before it; `decoder_rows` are then rows of `whole`.

    whole: the step as one process would run it. own: int64 [n], this rank's rows among the N. begins: int64 [n],
    positions at which their requests' rows of the step begin.
    rows, singles, pairs, kept: gather what was made of the rows, of `singles`, of `pairs.rows` and of `pairs.kept`, in
        the order that they have in `whole`. decoder: gathers the decoder half's rows [M, ...] from rows [n, ...].
    """

    whole: Batch
    own: Tensor
    begins: Tensor
    rows: Gather
    singles: Gather
    pairs: Gather
    kept: Gather
    decoder: Gather
