"""Balanced context parallel: a step's prompts are cut so that the ranks of a group have equal work in every layer.

One rank after the other takes rows from both ends of what is left of a prompt: cheap ones from the front, where there
is little to see, and dear ones from the back, just so many of each that ranks have equally many rows and equal work of
attention and index. So they are done at the same time with every layer, at whose end they wait for each other. What is
too short to be cut goes whole to the rank with the least work. Every rank keeps all that a step leaves in caches.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deepinfer.config.model import ModelConfig
from deepinfer.core.batch import Batch, Gather, Pairs, Pictures, Shared
from deepinfer.core.plan import Span
from deepinfer.model.batching import Integers, PairRows, Stretches, pair_rows, to_tensor, write_starts
from deepinfer.parallel.collectives import Collectives

LEAST_PIECE = 8
"""Rows of the shortest piece that is worth the exchanges."""


class RowWork:
    """Multiplications that attention and index of the encoder half do for rows."""

    def __init__(self, config: ModelConfig) -> None:
        encoder = range(config.decoder_start)
        self._window, self._topk = config.sliding_window, config.index_topk
        self._head = 2 * config.num_attention_heads * config.head_dim
        self._index = config.index_n_heads * config.index_head_dim
        self._layers = len(encoder)
        self._ratios = [config.ratio(layer) for layer in encoder if config.ratio(layer)]
        self._indexed = [config.ratio(layer) for layer in encoder if layer in config.index_source_layer_ids]

    def attention(self, positions: Integers) -> Integers:
        """Of rows at `positions`, in all layers."""
        keys = self._layers * np.minimum(positions + 1, self._window)
        keys = keys + sum(np.minimum((positions + 1) // ratio, self._topk) for ratio in self._ratios)
        return np.asarray(keys * self._head)

    def index(self, positions: Integers) -> Integers:
        """The same of the index."""
        scored = np.zeros_like(positions) + sum((positions + 1) // ratio for ratio in self._indexed)
        return np.asarray(scored * self._index)

    def __call__(self, positions: Integers) -> Integers:
        """Both."""
        return self.attention(positions) + self.index(positions)


def is_shared(spans: Sequence[Span], ranks: int) -> bool:
    """Whether a step is worth sharing: it has a prompt's rows to cut. Others are run whole by every rank."""
    return any(_can_be_cut(span, ranks) for span in spans)


def cut_rows(spans: Sequence[Span], ranks: int, work: RowWork) -> list[list[tuple[int, Span]]]:
    """For each rank its pieces, each with the number of the span that it is of; every row once, pairs whole."""
    shares: list[list[tuple[int, Span]]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    whole: list[tuple[int, int]] = []
    for number, span in enumerate(spans):
        if not _can_be_cut(span, ranks):
            whole.append((int(work(np.arange(span.first, span.end)).sum()), number))
            continue
        for rank, pieces in enumerate(_from_both_ends(span, ranks, work)):
            for first, end in pieces:
                if first < end:
                    shares[rank].append((number, _piece(span, first, end)))
                    loads[rank] += int(work(np.arange(first, end)).sum())
    for cost, number in sorted(whole, reverse=True):
        rank = loads.index(min(loads))
        shares[rank].append((number, spans[number]))
        loads[rank] += cost
    return shares


def share_rows(whole: Batch, spans: Sequence[Span], work: RowWork, pair_ring: int, group: Collectives) -> Batch:
    """This rank's part of a step with `spans`, which `whole` is; all ranks of the group call it for the same step."""
    device, layout = whole.ids.device, _Layout(spans, cut_rows(spans, group.size, work), pair_ring)
    rows, pairs = layout.rows[group.rank], layout.pairs
    own = to_tensor(rows, device)
    written = layout.reached(write_starts(spans))
    decoded = layout.reached(np.array([span.decoder_from for span in spans], dtype=np.int64))

    def gather(mask: npt.NDArray[np.bool_]) -> Gather:
        return _Gather(layout.rows, mask, group, device)

    shared = Shared(
        whole=whole,
        own=own,
        begins=to_tensor(layout.begins[rows], device),
        rows=gather(np.ones_like(written)),
        singles=gather(written),
        pairs=gather(pairs.completed),
        kept=gather(pairs.kept),
        decoder=_Gather(layout.rows, decoded, group, device, whole.decoder_rows),
    )
    return replace(
        whole,
        ids=whole.ids[own],
        encoder=layout.stretches[group.rank].half(device),
        singles=to_tensor(np.flatnonzero(written[rows]), device),
        pairs=layout.own_pairs(group.rank, device),
        pictures=None if whole.pictures is None else _own_pictures(whole.pictures, layout.places(group.rank), own),
        shared=shared,
    )


class _Gather:
    """Brings together what ranks made of those of their rows that `mask` has; padded to the most that one rank has."""

    def __init__(
        self,
        rows: Sequence[Integers],
        mask: npt.NDArray[np.bool_],
        group: Collectives,
        device: torch.device,
        order: Tensor | None = None,
    ) -> None:
        """rows: of each rank. order: rows as results stand, for which values of all rows come; None: ascending."""
        made = [part[mask[part]] for part in rows]
        self._most, self._group = max(map(len, made)), group
        places = np.zeros(len(mask), dtype=np.int64)
        for rank, part in enumerate(made):
            places[part] = rank * self._most + np.arange(len(part))
        self._places = to_tensor(places[mask], device) if order is None else to_tensor(places, device)[order]
        self._selected = None if order is None else to_tensor(np.flatnonzero(mask[rows[group.rank]]), device)

    def __call__(self, values: Tensor) -> Tensor:
        """Rows [n, ...] of this rank -> [N, ...]."""
        if not self._most:
            return values[:0]
        if self._selected is not None:
            values = values[self._selected]
        return self._group.gather(values, self._most)[self._places]


@dataclass(frozen=True)
class _Layout:
    """Where everybody's rows lie, on the host."""

    spans: Sequence[Span]
    shares: Sequence[Sequence[tuple[int, Span]]]
    pair_ring: int

    @cached_property
    def whole(self) -> Stretches:
        return Stretches.encoder(self.spans)

    @cached_property
    def stretches(self) -> list[Stretches]:
        """Of each rank's pieces."""
        return [Stretches.encoder([piece for _, piece in share]) for share in self.shares]

    @cached_property
    def rows(self) -> list[Integers]:
        """For each rank the rows of the step that it runs, in its own order."""
        starts, found = self.whole.by_span(self.whole.starts), []
        for share, stretches in zip(self.shares, self.stretches, strict=True):
            begins = [starts[number] + piece.first - self.spans[number].first for number, piece in share]
            ordered = np.array(begins, dtype=np.int64)[stretches.spans]
            found.append(np.arange(int(stretches.counts.sum())) + stretches.spread(ordered - stretches.starts))
        return found

    @cached_property
    def begins(self) -> Integers:
        """Of every row, the position at which its span begins."""
        return self.whole.spread(self.whole.firsts)

    def reached(self, positions: Integers) -> npt.NDArray[np.bool_]:
        """Of every row whether it lies at or behind the position given for its span."""
        return np.asarray(self.whole.positions >= self.whole.spread(positions[self.whole.spans]))

    @cached_property
    def pairs(self) -> PairRows:
        return pair_rows(self.whole, write_starts(self.spans)[self.whole.spans], self.pair_ring)

    def places(self, rank: int) -> Integers:
        """Of every row of the step and, behind them, every pending one, its place among the rank's; -1: elsewhere."""
        rows, count = self.rows[rank], len(self.whole.positions)
        places = np.full(count + len(self.pairs.pending), -1, dtype=np.int64)
        places[rows] = np.arange(len(rows))
        here = self.pending(rank)
        places[count + here] = len(rows) + np.arange(len(here))
        return places

    def pending(self, rank: int) -> Integers:
        """Numbers of the pending rows whose partners the rank runs."""
        return np.flatnonzero(np.isin(self.whole.starts[self.pairs.pending], self.rows[rank]))

    def own_pairs(self, rank: int, device: torch.device) -> Pairs:
        """Of the rank's rows."""
        rows, pairs, whole = self.rows[rank], self.pairs, self.whole
        completed, pending = np.flatnonzero(pairs.completed[rows]), pairs.pending[self.pending(rank)]
        partners = self.places(rank)[pairs.partners[rows[completed]]]
        kept = np.flatnonzero(pairs.kept[rows])
        columns = completed, partners, whole.slots[pending], whole.firsts[pending] - 1, kept
        return Pairs(*(to_tensor(column, device) for column in columns))


def _can_be_cut(span: Span, ranks: int) -> bool:
    return span.token_ids is not None and span.count >= 2 * ranks * LEAST_PIECE


def _from_both_ends(span: Span, ranks: int, work: RowWork) -> Iterator[list[tuple[int, int]]]:
    """For each rank the positions of its pieces; cuts lie at even positions, so that pairs stay whole."""
    costs = work(np.arange(span.first, span.end))
    before = np.concatenate(([0], np.cumsum(costs)))
    low, high = 0, span.count
    for left in range(ranks, 1, -1):
        take, aim = (high - low) // left, (before[high] - before[low]) // left
        front = np.arange(take + 1)
        found = before[low + front] - before[low] + before[high] - before[high - take + front]  # falls with `front`
        chosen = int(np.searchsorted(-found, -aim))
        cuts = low + chosen, high - take + chosen
        middle, last = (cut - (span.first + cut) % 2 for cut in cuts)
        middle = max(low, middle)
        yield [(span.first + low, span.first + middle), (span.first + last, span.first + high)]
        low, high = middle, last
    yield [(span.first + low, span.first + high)]


def _piece(span: Span, first: int, end: int) -> Span:
    return replace(span, first=first, count=end - first, token_ids=())


def _own_pictures(pictures: Pictures, places: Integers, own: Tensor) -> Pictures:
    rows = to_tensor(places, own.device)[pictures.rows]
    here = rows >= 0
    return Pictures(pictures.types[own], pictures.cells[here], rows[here])
