"""One step of the model as device tensors.

The rows of a half of the model lie in groups: stretches (consecutive rows of one slot) of equal length, one after
another. So a group is a dense [stretches, rows, ...] view of any tensor of rows, and nothing is done row by row.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

Gather = Callable[[Tensor], Tensor]
"""Brings together what the ranks of a group have made: this rank's rows [n, ...] -> those of all [N, ...]."""


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
    shared: what ranks do that share the step; the batch is then one rank's, see there. None: no sharing.
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
class SharedHalf:
    """A half of the model of whose M rows each rank of a group runs m, and all keep what they leave.

    whole: the half as one process would run it. own: int64 [m], this rank's rows among the M. begins: int64 [m],
    positions at which their requests' rows of the half begin. gather: rows [m, ...] of each rank -> [M, ...].
    """

    whole: Half
    own: Tensor
    begins: Tensor
    gather: Gather


@dataclass(frozen=True, slots=True)
class Shared:
    """A step that the ranks of a group share. In a batch with one, all that is about rows is about this rank's.

    Only sampled and scored rows are those of the whole step, of which every rank gets what the last layer made.

    whole: the step as one process would run it. encoder, decoder: the halves; a decoder of None: each rank runs it all.
    singles, pairs, kept: gather what was made of `singles`, of `pairs.rows` and of `pairs.kept`, in the order that they
        have in `whole`. streams: gives this rank's rows of the decoder half from the encoder half's rows of all ranks.
        features: gathers the decoder half's features as far as windows hold their rows; the others are zeros.
    """

    whole: Batch
    encoder: SharedHalf
    decoder: SharedHalf | None
    singles: Gather
    pairs: Gather
    kept: Gather
    streams: Gather
    features: Gather
