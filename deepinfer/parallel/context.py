"""Balanced context parallel: a step's prompts are cut so that the ranks of a group have equal work in every layer.

One rank after the other takes rows from both ends of what is left of a prompt: cheap ones from the front, where there
is little to see, and dear ones from the back, just so many of each that ranks have equally many rows and equal work of
attention and index. So they are done at the same time with every layer, at whose end they wait for each other. What is
too short to be cut goes whole to the rank with the least work. Every rank keeps all that a step leaves in caches.

The halves of the model are cut each by itself: of a long prompt the decoder half runs only the end. Where that is
little, every rank runs all of it, which needs no exchange.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deepinfer.config.model import ModelConfig
from deepinfer.core.batch import Batch, Gather, Half, Pairs, Pictures, Shared, SharedHalf
from deepinfer.core.plan import Span
from deepinfer.model.batching import Integers, PairRows, Stretches, pair_rows, to_tensor, write_starts
from deepinfer.parallel.collectives import Collectives

LEAST_PIECE = 8
"""Rows of the shortest piece that is worth the exchanges."""
LEAST_ROWS = 128
"""Rows for each rank from which on it is worth to share the decoder half, or a step without a prompt to cut."""

Mask = npt.NDArray[np.bool_]


class RowWork:
    """Multiplications for rows, in the encoder half."""

    def __init__(self, config: ModelConfig) -> None:
        encoder = range(config.decoder_start)
        self._window, self._topk = config.sliding_window, config.index_topk
        self._head = 2 * config.num_attention_heads * config.head_dim
        self._index = config.index_n_heads * config.index_head_dim
        self._layers = len(encoder)
        self._ratios = [config.ratio(layer) for layer in encoder if config.ratio(layer)]
        self._indexed = [config.ratio(layer) for layer in encoder if layer in config.index_source_layer_ids]
        heads, experts = config.num_attention_heads * config.head_dim, config.num_experts_per_tok + 1
        projected = config.hidden_size * (config.q_lora_rank + config.head_dim + config.o_groups * config.o_lora_rank)
        projected += heads * (config.q_lora_rank + config.o_lora_rank)
        self._row = len(encoder) * (projected + 3 * experts * config.hidden_size * config.moe_intermediate_size)

    def attention(self, positions: Integers) -> Integers:
        """Of attention, for rows at `positions`, in all layers."""
        keys = self._layers * np.minimum(positions + 1, self._window)
        keys = keys + sum(np.minimum((positions + 1) // ratio, self._topk) for ratio in self._ratios)
        return np.asarray(keys * self._head)

    def index(self, positions: Integers) -> Integers:
        """Of the index."""
        scored = np.zeros_like(positions) + sum((positions + 1) // ratio for ratio in self._indexed)
        return np.asarray(scored * self._index)

    def __call__(self, positions: Integers) -> Integers:
        """Of both, which depend on the position."""
        return self.attention(positions) + self.index(positions)

    def total(self, first: int, end: int) -> int:
        """Of all that rows at positions first to end - 1 need, with projections and experts."""
        return int(self(np.arange(first, end)).sum()) + self._row * (end - first)


def is_shared(spans: Sequence[Span], ranks: int, experts_shared: bool = False) -> bool:
    """Whether a step is worth sharing: it has a prompt's rows to cut. Others are run whole by every rank.

    experts_shared: rows that every rank runs visit their experts as often; then steps of many rows are shared, too.
    """
    if any(_can_be_cut(span, ranks) for span in spans):
        return True
    return experts_shared and len(spans) >= ranks and sum(span.count for span in spans) >= ranks * LEAST_ROWS


def cut_rows(spans: Sequence[Span], ranks: int, work: RowWork) -> list[list[tuple[int, Span]]]:
    """For each rank its pieces, each with the number of the span that it is of; every row once, pairs whole."""
    shares: list[list[tuple[int, Span]]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    whole: list[tuple[int, int]] = []
    for number, span in enumerate(spans):
        if not _can_be_cut(span, ranks):
            whole.append((work.total(span.first, span.end), number))
            continue
        for rank, pieces in enumerate(_from_both_ends(span, ranks, work)):
            for first, end in pieces:
                if first < end:
                    shares[rank].append((number, _piece(span, first, end)))
                    loads[rank] += work.total(first, end)
    for cost, number in sorted(whole, reverse=True):
        rank = loads.index(min(loads))
        shares[rank].append((number, spans[number]))
        loads[rank] += cost
    return shares


def share_rows(whole: Batch, spans: Sequence[Span], work: RowWork, rings: tuple[int, int], group: Collectives) -> Batch:
    """This rank's part of a step with `spans`, which `whole` is; all ranks of the group call it for the same step.

    rings: rows that windows, and tokens that pending pairs keep of a request.
    """
    device, rank, begins = whole.ids.device, group.rank, write_starts(spans)
    encoder, decoder = _encoder_layout(spans, group, work), _decoder_layout(spans, group, work)
    rows, pairs = encoder.rows[rank], pair_rows(encoder.whole, begins[encoder.whole.spans], rings[1])
    written = encoder.reached(begins)
    decoded = encoder.reached(np.array([span.decoder_from for span in spans], dtype=np.int64))
    decoder_half, decoder_rows = whole.decoder, whole.decoder_rows
    if decoder is not None:
        decoder_half = decoder.stretches[rank].half(device)
        decoder_rows = decoder_rows[to_tensor(decoder.rows[rank], device)]
    shared = Shared(
        whole=whole,
        encoder=encoder.half(whole.encoder, device),
        decoder=None if decoder is None else decoder.half(whole.decoder, device),
        singles=encoder.gather(written, device),
        pairs=encoder.gather(pairs.completed, device),
        kept=encoder.gather(pairs.kept, device),
        streams=encoder.gather(decoded, device, order=decoder_rows, select=True),
        features=_keep_all if decoder is None else _features(decoder, rings[0], device),
    )
    places = _places(rows, len(written))
    return replace(
        whole,
        ids=whole.ids[shared.encoder.own],
        encoder=encoder.stretches[rank].half(device),
        decoder=decoder_half,
        decoder_rows=decoder_rows,
        singles=to_tensor(np.flatnonzero(written[rows]), device),
        pairs=_own_pairs(encoder.whole, pairs, rows, places, device),
        pictures=None if whole.pictures is None else _own_pictures(whole.pictures, places, shared.encoder.own),
        shared=shared,
    )


@dataclass(frozen=True)
class _Layout:
    """Where all ranks' rows of a half lie, on the host.

    whole: the half as one process has it. shares: the pieces of each rank, with the spans that they are of. stretches:
    of each rank's pieces.
    """

    whole: Stretches
    shares: Sequence[Sequence[tuple[int, Span]]]
    stretches: Sequence[Stretches]
    group: Collectives

    @cached_property
    def rows(self) -> list[Integers]:
        """For each rank the rows of the whole half that it runs, in its own order."""
        before, found = self.whole.by_span(self.whole.starts - self.whole.firsts), []
        for share, stretches in zip(self.shares, self.stretches, strict=True):
            begins = np.array([before[number] + piece.first for number, piece in share], dtype=np.int64)
            shift = stretches.spread(begins[stretches.spans] - stretches.starts)
            found.append(np.arange(len(shift)) + shift)
        return found

    def reached(self, positions: Integers) -> Mask:
        """Of every row whether it lies at or behind the position given for its span."""
        return np.asarray(self.whole.positions >= self.whole.spread(positions[self.whole.spans]))

    def half(self, whole: Half, device: torch.device) -> SharedHalf:
        """What the model needs to know of it."""
        rows = self.rows[self.group.rank]
        begins = self.whole.spread(self.whole.firsts)[rows]
        everything = np.ones(len(self.whole.positions), dtype=np.bool_)
        return SharedHalf(whole, to_tensor(rows, device), to_tensor(begins, device), self.gather(everything, device))

    def gather(self, mask: Mask, device: torch.device, order: Tensor | None = None, select: bool = False) -> Gather:
        """Brings together what ranks made of those of their rows that `mask` has; padded to the most that one has.

        order: int64 [R] on the device, rows as results stand; None: ascending. select: values come of all rows.
        """
        made = [rows[mask[rows]] for rows in self.rows]
        most, group = max(map(len, made)), self.group
        numbers = np.zeros(len(mask), dtype=np.int64)
        for rank, rows in enumerate(made):
            numbers[rows] = rank * most + np.arange(len(rows))
        places = to_tensor(numbers[mask], device) if order is None else to_tensor(numbers, device)[order]
        selected = to_tensor(np.flatnonzero(mask[self.rows[group.rank]]), device) if select else None

        def bring(values: Tensor) -> Tensor:
            if not most:
                return values[:0]
            return group.gather(values if selected is None else values[selected], most)[places]

        return bring


def _encoder_layout(spans: Sequence[Span], group: Collectives, work: RowWork) -> _Layout:
    shares = cut_rows(spans, group.size, work)
    own = [Stretches.encoder([piece for _, piece in share]) for share in shares]
    return _Layout(Stretches.encoder(spans), shares, own, group)


def _decoder_layout(spans: Sequence[Span], group: Collectives, work: RowWork) -> _Layout | None:
    """None where it is not worth it, or some rank would have nothing to do."""
    begins = [max(span.first, span.decoder_from) for span in spans]
    ends = {
        number: replace(span, first=begin, count=span.end - begin)
        for number, (span, begin) in enumerate(zip(spans, begins, strict=True))
        if begin < span.end
    }
    if sum(span.count for span in ends.values()) < group.size * LEAST_ROWS:
        return None
    numbers = list(ends)
    cut = cut_rows(list(ends.values()), group.size, work)
    if not all(cut):
        return None
    shares = [[(numbers[place], piece) for place, piece in share] for share in cut]
    own = [Stretches.decoder([piece for _, piece in share]) for share in shares]
    return _Layout(Stretches.decoder(spans), shares, own, group)


def _features(decoder: _Layout, ring: int, device: torch.device) -> Gather:
    whole = decoder.whole
    kept = whole.positions >= whole.spread(whole.ends) - ring
    gather, places = decoder.gather(kept, device, select=True), to_tensor(np.flatnonzero(kept), device)

    def bring(values: Tensor) -> Tensor:
        return values.new_zeros(len(kept), values.shape[1]).index_copy_(0, places, gather(values))

    return bring


def _keep_all(values: Tensor) -> Tensor:
    return values


def _places(rows: Integers, count: int) -> Integers:
    """Of each of `count` rows its place among `rows`; -1: not there."""
    places = np.full(count, -1, dtype=np.int64)
    places[rows] = np.arange(len(rows))
    return places


def _own_pairs(whole: Stretches, pairs: PairRows, rows: Integers, places: Integers, device: torch.device) -> Pairs:
    """Of the `rows` of a rank, which have `places` there."""
    here = np.flatnonzero(places[whole.starts[pairs.pending]] >= 0)  # the pending rows whose partners are among them
    numbers = np.full(len(pairs.pending), -1, dtype=np.int64)
    numbers[here] = len(rows) + np.arange(len(here))
    completed, pending = np.flatnonzero(pairs.completed[rows]), pairs.pending[here]
    partners = np.concatenate((places, numbers))[pairs.partners[rows[completed]]]
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
