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
    fields = [(s.slot, s.first, s.end, s.floor, s.cut, s.decoder_from, s.write_from) for s in spans]
    slots, firsts, ends, floors, cuts, decoded, written = np.array(fields, dtype=np.int64).reshape(-1, 7).T
    encoder = _Stretches.sort(slots, firsts, ends, floors, np.zeros_like(cuts))
    # The decoder half runs the end of some spans, and its windows hold only what it has run.
    begins = np.minimum(np.maximum(firsts, decoded), ends)
    decoder = _Stretches.sort(slots, begins, ends, np.maximum(floors, decoded), cuts)
    starts = encoder.by_span(encoder.starts)
    shift = (starts - firsts)[decoder.spans]  # from a decoder row's position to its row in the encoder half
    return Arrangement(
        starts=starts,
        decoder_starts=decoder.by_span(decoder.starts),
        encoder=encoder.half(device),
        decoder=decoder.half(device),
        decoder_rows=_tensor(decoder.positions + decoder.spread(shift), device),
        sample_rows=_tensor(_sampled(spans, decoder), device),
        singles=_tensor(np.flatnonzero(encoder.positions >= encoder.spread(written[encoder.spans])), device),
        pairs=_pairs(encoder, written[encoder.spans], pair_ring, device),
    )


@dataclass(frozen=True)
class _Stretches:
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
    def sort(cls, slots: Integers, firsts: Integers, ends: Integers, floors: Integers, cuts: Integers) -> "_Stretches":
        order = np.lexsort((_bucket(ends), ends - firsts))
        return cls(order, *(column[order] for column in (slots, firsts, ends, floors, cuts)))

    @cached_property
    def counts(self) -> Integers:
        return self.ends - self.firsts

    @cached_property
    def starts(self) -> Integers:
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
        floors, cuts = self.spread(self.floors), self.spread(self.cuts)
        lowest = np.where(self.positions >= cuts, np.maximum(cuts, floors), floors)
        return Half(
            groups=tuple(self._groups(device)),
            positions=_tensor(self.positions, device),
            slots=_tensor(self.spread(self.slots), device),
            lowest=_tensor(lowest, device),
        )

    def _groups(self, device: torch.device) -> list[Group]:
        kinds = np.stack((self.counts, _bucket(self.ends)))
        edges = np.flatnonzero((kinds[:, 1:] != kinds[:, :-1]).any(0)) + 1
        slots, firsts, floors = (_tensor(column, device) for column in (self.slots, self.firsts, self.floors))
        groups = []
        for begin, end in zip([0, *edges], [*edges, len(self.spans)], strict=True):
            if begin < end and self.counts[begin]:
                part = slice(begin, end)
                start, count, ends = int(self.starts[begin]), int(self.counts[begin]), tuple(self.ends[part].tolist())
                groups.append(Group(start, count, slots[part], firsts[part], floors[part], ends))
        return groups


def _bucket(ends: Integers) -> Integers:
    return np.ceil(np.log2(np.maximum(ends, _SHORT))).astype(np.int64)


def _sampled(spans: Sequence[Span], decoder: _Stretches) -> Integers:
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


def _pairs(encoder: _Stretches, written: Integers, pair_ring: int, device: torch.device) -> Pairs:
    positions, rows = encoder.positions, np.arange(len(encoder.positions))
    odd = positions % 2 == 1
    completed = odd & (positions >= encoder.spread(written))
    # A stretch that begins at an odd position takes that row's partner from an earlier step.
    pending = np.flatnonzero((encoder.counts > 0) & (encoder.firsts % 2 == 1) & (encoder.firsts >= written))
    partners = rows - 1
    partners[encoder.starts[pending]] = len(rows) + np.arange(len(pending))
    kept = ~odd & (positions >= encoder.spread(encoder.ends) - 2 * pair_ring)
    columns = rows[completed], partners[completed], encoder.slots[pending], encoder.firsts[pending] - 1, rows[kept]
    return Pairs(*(_tensor(column, device) for column in columns))


def _tensor(column: Integers, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(column)).to(device)
