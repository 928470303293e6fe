"""From the spans of a plan to the rows of both halves of the model."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deepinfer.core.batch import Group, Half, Pairs
from deepinfer.core.plan import Span

Integers = npt.NDArray[np.int64]

_SHORT = 1024
"""Requests up to this length may share a group whatever their lengths; longer ones if within a factor of two."""


@dataclass(frozen=True)
class Arrangement:
    """Where the rows of a step lie; fields as in `Batch`.

    starts, decoder_starts: int64 [spans] on the host, each span's first row in the encoder and the decoder half.
    """

    starts: Integers
    decoder_starts: Integers
    encoder: Half
    decoder: Half
    decoder_rows: Tensor
    sample_rows: Tensor
    singles: Tensor
    pairs: Pairs


def arrange(spans: Sequence[Span], pair_ring: int, device: torch.device) -> Arrangement:
    """Lay out the rows of `spans`; `pair_ring` is how many pending tokens a ratio-2 source keeps a slot.

    Sampled rows stand in the order of the spans: with `token_ids` None all rows of one, else its last.
    Raises ValueError for a span that is to be sampled without its last row running the decoder half.
    """
    encoder, decoder = Stretches.encoder(spans), Stretches.decoder(spans)
    firsts, written = np.array([span.first for span in spans], dtype=np.int64), write_starts(spans)
    starts = encoder.by_span(encoder.starts)
    shift = (starts - firsts)[decoder.spans]  # from a decoder row's position to its row in the encoder half
    return Arrangement(
        starts=starts,
        decoder_starts=decoder.by_span(decoder.starts),
        encoder=encoder.half(device),
        decoder=decoder.half(device),
        decoder_rows=to_tensor(decoder.positions + decoder.spread(shift), device),
        sample_rows=to_tensor(_sampled(spans, decoder), device),
        singles=to_tensor(np.flatnonzero(encoder.positions >= encoder.spread(written[encoder.spans])), device),
        pairs=_pairs(pair_rows(encoder, written[encoder.spans], pair_ring), encoder, device),
    )


def write_starts(spans: Sequence[Span]) -> Integers:
    """The positions from which on compressed entries are written, [spans]."""
    return np.array([span.write_from for span in spans], dtype=np.int64)


@dataclass(frozen=True)
class Stretches:
    """Stretches of one half in the order of their rows, so that groups are contiguous; arrays [stretches].

    spans: the spans they come from. cuts: rows at or after it see no window key before it.
    """

    spans: Integers
    slots: Integers
    firsts: Integers
    ends: Integers
    floors: Integers
    cuts: Integers

    @classmethod
    def sort(cls, slots: Integers, firsts: Integers, ends: Integers, floors: Integers, cuts: Integers) -> "Stretches":
        """Of columns, a value a span, in the order of the spans."""
        order = np.lexsort((_bucket(ends), ends - firsts))
        return cls(order, *(column[order] for column in (slots, firsts, ends, floors, cuts)))

    @classmethod
    def encoder(cls, spans: Sequence[Span]) -> "Stretches":
        """Those of the encoder half, which runs all rows."""
        fields = [(s.slot, s.first, s.end, s.floor) for s in spans]
        slots, firsts, ends, floors = np.array(fields, dtype=np.int64).reshape(-1, 4).T
        return cls.sort(slots, firsts, ends, floors, np.zeros_like(floors))

    @classmethod
    def decoder(cls, spans: Sequence[Span]) -> "Stretches":
        """Those of the decoder half: it runs the end of some spans, and its windows hold only what it has run."""
        fields = [(s.slot, s.first, s.end, s.floor, s.cut, s.decoder_from) for s in spans]
        slots, firsts, ends, floors, cuts, decoded = np.array(fields, dtype=np.int64).reshape(-1, 6).T
        begins = np.minimum(np.maximum(firsts, decoded), ends)
        return cls.sort(slots, begins, ends, np.maximum(floors, decoded), cuts)

    @cached_property
    def counts(self) -> Integers:
        """Rows."""
        return self.ends - self.firsts

    @cached_property
    def starts(self) -> Integers:
        """The first row of each."""
        return np.cumsum(self.counts) - self.counts

    @cached_property
    def positions(self) -> Integers:
        """Of every row."""
        return np.arange(int(self.counts.sum()), dtype=np.int64) + self.spread(self.firsts - self.starts)

    def spread(self, values: Integers) -> Integers:
        """A value a stretch to a value a row."""
        return np.repeat(values, self.counts)

    def by_span(self, values: Integers) -> Integers:
        """A value a stretch to the order of the spans."""
        ordered = np.empty_like(values)
        ordered[self.spans] = values
        return ordered

    def half(self, device: torch.device) -> Half:
        """Their rows, on the device."""
        floors, cuts = self.spread(self.floors), self.spread(self.cuts)
        lowest = np.where(self.positions >= cuts, np.maximum(cuts, floors), floors)
        return Half(
            groups=tuple(self._groups(device)),
            positions=to_tensor(self.positions, device),
            slots=to_tensor(self.spread(self.slots), device),
            lowest=to_tensor(lowest, device),
        )

    def _groups(self, device: torch.device) -> list[Group]:
        kinds = np.stack((self.counts, _bucket(self.ends)))
        edges = np.flatnonzero((kinds[:, 1:] != kinds[:, :-1]).any(0)) + 1
        slots, firsts, floors = (to_tensor(column, device) for column in (self.slots, self.firsts, self.floors))
        groups = []
        for begin, end in zip([0, *edges], [*edges, len(self.spans)], strict=True):
            if begin < end and self.counts[begin]:
                part = slice(begin, end)
                start, count, ends = int(self.starts[begin]), int(self.counts[begin]), tuple(self.ends[part].tolist())
                groups.append(Group(start, count, slots[part], firsts[part], floors[part], ends))
        return groups


def _bucket(ends: Integers) -> Integers:
    return np.ceil(np.log2(np.maximum(ends, _SHORT))).astype(np.int64)


def _sampled(spans: Sequence[Span], decoder: Stretches) -> Integers:
    """The decoder rows that are to be sampled, span by span."""
    sampled = np.flatnonzero([span.sample for span in spans])
    wanted = np.array([1 + span.drafts for span in spans], dtype=np.int64)[sampled]
    counts = decoder.by_span(decoder.counts)[sampled]
    if (counts < wanted).any():
        wrong = spans[int(sampled[counts < wanted][0])]
        raise ValueError(f"request {wrong.request_id} is to be sampled, but its rows stop before the decoder half")
    ends = decoder.by_span(decoder.starts)[sampled] + counts
    inside = np.arange(int(wanted.sum())) - np.repeat(np.cumsum(wanted) - wanted, wanted)
    return np.repeat(ends - wanted, wanted) + inside


@dataclass(frozen=True)
class PairRows:
    """How N rows pair up, on the host.

    completed, kept: bool [N], rows as in `Pairs`. partners: int64 [N], of odd rows: a row, or N + z for the z-th
    pending one. pending: int64 [Z], the stretches that begin with a row whose partner is of an earlier step.
    """

    completed: npt.NDArray[np.bool_]
    partners: Integers
    pending: Integers
    kept: npt.NDArray[np.bool_]


def pair_rows(encoder: Stretches, written: Integers, pair_ring: int) -> PairRows:
    """`written`: where each stretch begins to write entries."""
    positions, rows = encoder.positions, np.arange(len(encoder.positions))
    odd = positions % 2 == 1
    # A stretch that begins at an odd position takes that row's partner from an earlier step.
    pending = np.flatnonzero((encoder.counts > 0) & (encoder.firsts % 2 == 1) & (encoder.firsts >= written))
    partners = rows - 1
    partners[encoder.starts[pending]] = len(rows) + np.arange(len(pending))
    kept = ~odd & (positions >= encoder.spread(encoder.ends) - 2 * pair_ring)
    return PairRows(odd & (positions >= encoder.spread(written)), partners, pending, kept)


def _pairs(found: PairRows, encoder: Stretches, device: torch.device) -> Pairs:
    completed, pending = np.flatnonzero(found.completed), found.pending
    columns = (
        completed,
        found.partners[completed],
        encoder.slots[pending],
        encoder.firsts[pending] - 1,
        np.flatnonzero(found.kept),
    )
    return Pairs(*(to_tensor(column, device) for column in columns))


def to_tensor(column: Integers, device: torch.device) -> Tensor:
    """On the device."""
    return torch.from_numpy(np.ascontiguousarray(column)).to(device)
