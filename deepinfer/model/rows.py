"""The kernels' way through a layer's attention: rows by themselves, over stored bytes by address.

The same mathematics as `attention` and `selection`, which go group by group over unpacked keys: a different cut for
processors that gather and decode faster than they write. No shape here depends on a row's position, so that a decode
step can be recorded once and replayed.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional

from deepinfer.cache.storage import Caches
from deepinfer.config.model import ModelConfig
from deepinfer.core.batch import Gather, Half, SharedHalf
from deepinfer.model.row_operators import RowOperators
from deepinfer.model.weights import AttentionWeights, IndexerWeights
from deepinfer.ops.beside import Lane, beside
from deepinfer.ops.indexer import best_blocks
from deepinfer.ops.linear import Fp8Rows, linear
from deepinfer.ops.norm import rms_norm, rounded_rms_norm
from deepinfer.ops.places import single_rows
from deepinfer.ops.rope import rotations
from deepinfer.ops.rows import Index

SHARED_ROWS = 8
"""Most rows of one request that share a pass over its index keys."""
SCORES = 1 << 28
"""Most index scores to hold at a time; more rows are taken in turn."""


@dataclass
class RowReach:
    """What the M rows of one half reach, and what its layers leave for later layers of the half.

    positions, slots: int64, int32 [M]. plain, compressed: complex64 [M, F]. longest: tokens of the longest request.
    near: int32 [M, W], window places, in the rings, or among `old` rows and the step's own behind them.
    old: int64 [K * (W - 1)], ring addresses; None: windows are read from the rings. places: int64 [M], the rows' own
        ring addresses, -1 for rows that a later one of the step overwrites.
    starts: first rows of stretches, on the host. group_slots, group_firsts, group_counts: as in `Index`; group_starts
        the same as group_firsts, on the host.
    latents, chosen, blocks: of the newest source, from its last index layer.
    visible: int32 [M], how many of its entries each row sees.
    gather, stay: where ranks share the rows. Then the step's rows in `near` and `places` are those of the whole step,
        whose keys `gather` makes; int64 `stay` are those of them with a place.
    """

    positions: Tensor
    slots: Tensor
    plain: Tensor
    compressed: Tensor
    longest: int
    near: Tensor
    old: Tensor | None
    places: Tensor
    group_slots: Tensor
    group_firsts: Tensor
    group_counts: Tensor
    group_starts: list[int]
    latents: Tensor | None = None
    keys: Tensor | None = None
    ratio: int = 0
    chosen: Tensor | None = None
    blocks: Tensor | None = None
    visible: Tensor | None = None
    gather: Gather | None = None
    stay: Tensor | None = None

    def enter_source(self, caches: Caches, config: ModelConfig, layer: int) -> None:
        """From here on layers read the compressed KV of another source."""
        source = config.kv_source_layer_ids.index(layer)
        self.latents, self.keys = caches.latents[source].flatten(0, 1), caches.index_keys[source].flatten(0, 1)
        self.ratio, self.chosen, self.blocks = config.ratio(layer), None, None
        self.visible = ((self.positions + 1) // self.ratio).int()


def reach_rows(half: Half, window: int, ring: int, plain: Tensor, compressed: Tensor) -> RowReach:
    """Plan a half for rings of `ring` rows a slot; plain, compressed: FP32 [F], angles per position step."""
    if all(group.count == 1 for group in half.groups):
        return _reach_single_rows(half, window, ring, plain, compressed)
    device, counts = half.positions.device, [group.count for group in half.groups for _ in group.ends]
    starts = [0, *accumulate(counts)][:-1]
    inside = torch.cat([torch.arange(g.count, device=device).repeat(len(g.ends)) for g in half.groups] or [half.slots])
    distance = torch.arange(window, device=device)
    seen = (half.positions - half.lowest + 1).clamp(max=window)
    base = half.slots * ring
    back = base[:, None] + (half.positions[:, None] - distance).remainder(ring)
    old = None
    if max(counts, default=0) + window - 1 > ring:
        before = torch.arange(1 - window, 0, device=device)
        positions = torch.cat([group.firsts[:, None] + before for group in half.groups])
        slots = torch.cat([group.slots for group in half.groups])
        old = (slots[:, None] * ring + positions.remainder(ring)).flatten()
        stretch = torch.repeat_interleave(
            torch.arange(len(counts), device=device), torch.tensor(counts, device=device), output_size=len(inside)
        )
        own = len(old) + torch.arange(len(inside), device=device)[:, None] - distance
        earlier = stretch[:, None] * (window - 1) + window - 1 - (distance - inside[:, None])
        back = torch.where(distance <= inside[:, None], own, earlier)
    ends = torch.cat([group.firsts.repeat_interleave(group.count) + group.count for group in half.groups] or [base])
    kept = half.positions >= ends - ring
    groups = list(_groups(starts, counts))
    firsts = torch.tensor([first for first, _ in groups], dtype=torch.int32, device=device)
    return RowReach(
        positions=half.positions,
        slots=half.slots.int(),
        plain=rotations(half.positions, plain),
        compressed=rotations(half.positions, compressed),
        longest=max((group.longest for group in half.groups), default=0),
        near=torch.where(distance < seen[:, None], back, -1).int(),
        old=old,
        places=torch.where(kept, base + half.positions.remainder(ring), -1),
        group_slots=half.slots[firsts.long()].int(),
        group_firsts=firsts,
        group_counts=torch.tensor([count for _, count in groups], dtype=torch.int32, device=device),
        group_starts=[first for first, _ in groups],
    )


def reach_shared_rows(
    half: Half, shared: SharedHalf, window: int, ring: int, plain: Tensor, compressed: Tensor
) -> RowReach:
    """The same for this rank's rows of a half that ranks share."""
    own = reach_rows(half, window, ring, plain, compressed)
    whole = reach_rows(shared.whole, window, ring, plain, compressed)
    stay = (whole.places >= 0).nonzero()[:, 0]
    return replace(
        own, near=whole.near[shared.own], old=whole.old, places=whole.places[stay], gather=shared.gather, stay=stay
    )


def _reach_single_rows(half: Half, window: int, ring: int, plain: Tensor, compressed: Tensor) -> RowReach:
    """The same for stretches of one row: from the device's numbers alone, as a recorded step has to."""
    rows = single_rows(half.positions, half.slots, half.lowest, window, ring, plain, compressed)
    return RowReach(
        positions=half.positions,
        slots=rows.slots,
        plain=rows.plain,
        compressed=rows.compressed,
        longest=max((group.longest for group in half.groups), default=0),
        near=rows.near,
        old=None,
        places=rows.places,
        group_slots=rows.slots,
        group_firsts=rows.firsts,
        group_counts=rows.counts,
        group_starts=list(range(len(rows.slots))),
    )


def _groups(starts: list[int], counts: list[int]) -> Iterator[tuple[int, int]]:
    """(first row, rows) of up to `SHARED_ROWS` rows of one stretch each."""
    for start, count in zip(starts, counts, strict=True):
        for first in range(start, start + count, SHARED_ROWS):
            yield first, min(SHARED_ROWS, start + count - first)


class RowAttention:
    """The attention of one layer; window-only where its ratio is 0."""

    def __init__(self, config: ModelConfig, layer: int, weights: AttentionWeights, operators: RowOperators) -> None:
        self._config, self._layer, self._weights, self._ops = config, layer, weights, operators
        self._compressed = config.ratio(layer) > 0
        self._publishes = config.candidates_enabled and layer == config.candidate_source_layer_id
        self._within = config.selects_candidates(layer)

    def __call__(self, h: Tensor, reach: RowReach, caches: Caches) -> Tensor:
        """Normed rows [M, H] of the half -> [M, H]. Extends the layer's windows; index layers renew the selection."""
        config, weights = self._config, self._weights
        turns = reach.compressed if self._compressed else reach.plain
        made = linear(h, weights.inputs)
        windows = beside(partial(self._extend, made[:, config.q_lora_rank :], turns, reach, caches), Lane.WINDOWS)
        norm = rms_norm if isinstance(weights.wq_b, Tensor) else rounded_rms_norm
        latent = norm(made[:, : config.q_lora_rank], weights.q_norm, config.rms_norm_eps)
        queries: Callable[[], Tensor] = partial(linear, latent, weights.wq_b)
        if weights.indexer is not None:
            queries = beside(queries, Lane.QUERIES)
            self._select(h, latent, weights.indexer, reach, caches)
        far = (reach.latents, reach.chosen) if self._compressed else (None, None)
        q = queries().view(len(h), config.num_attention_heads, config.head_dim)
        o = self._ops.attend(q, turns, windows(), reach.near, *far, weights.sink)
        return self._ops.output(o, turns, weights.wo_a, weights.wo_b)

    def _extend(self, kv: Tensor, turns: Tensor, reach: RowReach, caches: Caches) -> Tensor:
        """Add the rows' keys to the rings; the rows that `reach.near` points into."""
        if reach.gather is not None:
            return self._extend_shared(kv, turns, reach, reach.gather, caches)
        rings, before = caches.windows[self._layer].flatten(0, 1), 0 if reach.old is None else len(reach.old)
        stored = torch.empty(before + len(kv), rings.shape[1], dtype=torch.uint8, device=rings.device)
        if reach.old is not None:
            torch.index_select(rings, 0, reach.old, out=stored[:before])
        norm, eps = self._weights.kv_norm, self._config.rms_norm_eps
        self._ops.window_rows(kv, norm, turns, eps, reach.places, stored[before:], rings)
        return rings if reach.old is None else stored

    def _extend_shared(self, kv: Tensor, turns: Tensor, reach: RowReach, gather: Gather, caches: Caches) -> Tensor:
        """The same with the keys of all ranks' rows."""
        rings = caches.windows[self._layer].flatten(0, 1)
        packed = torch.empty(len(kv), rings.shape[1], dtype=torch.uint8, device=rings.device)
        nowhere = torch.full((len(kv),), -1, dtype=torch.int64, device=rings.device)
        self._ops.window_rows(kv, self._weights.kv_norm, turns, self._config.rms_norm_eps, nowhere, packed, rings)
        whole = gather(packed)
        stored = rings if reach.old is None else torch.cat((rings[reach.old], whole))
        rings.index_copy_(0, reach.places, whole[reach.stay])
        return stored

    def _select(
        self, h: Tensor, latent: Tensor | Fp8Rows, weights: IndexerWeights, reach: RowReach, caches: Caches
    ) -> None:
        config, visible = self._config, reach.visible
        assert reach.keys is not None, "an index source reads the compressed KV of a source at or before it"
        assert visible is not None
        live = reach.longest // reach.ratio
        blocks = reach.blocks if self._within else None
        publishes = self._publishes and -(-live // config.candidate_block_size) > config.candidate_topk_blocks
        index = Index(
            keys=reach.keys,
            page_table=caches.page_table,
            page_size=caches.page_size,
            ratio=reach.ratio,
            slots=reach.slots,
            visible=visible,
            length=-(-live // 64) * 64,
            group_slots=reach.group_slots,
            group_firsts=reach.group_firsts,
            group_counts=reach.group_counts,
        )
        if blocks is not None:
            index = _within(index, blocks, config.candidate_block_size)
        if live <= config.index_topk and not publishes and blocks is None:
            places = torch.arange(config.index_topk, dtype=torch.int32, device=h.device)
            reach.chosen = self._ops.entry_rows(torch.where(places < visible[:, None], places, -1), index)
        else:
            q = linear(latent, weights.wq_b).view(len(h), config.index_n_heads, config.index_head_dim)
            head_weights = linear(h, weights.weights_proj)
            reach.chosen, found = self._best(q, head_weights, reach, index, publishes)
            reach.blocks = found if publishes else reach.blocks

    def _best(
        self, q: Tensor, weights: Tensor, reach: RowReach, index: Index, publishes: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Addresses of chosen entries int32 [M, K], and blocks int32 [M, B] if this layer publishes them."""
        config = self._config
        factor = config.index_head_dim**-0.5 * config.index_n_heads**-0.5
        chosen, kept = [], []
        for part, rows in _parts(index, reach.group_starts, len(q)):
            scores = self._ops.index_scores(q[rows], reach.compressed[rows], weights[rows], factor, part)
            chosen.append(self._ops.best_entries(scores, part, config.index_topk))
            if publishes:
                kept.append(self._blocks(scores, part.visible))
        return _joined(chosen), _joined(kept) if publishes else None

    def _blocks(self, scores: Tensor, visible: Tensor) -> Tensor:
        config = self._config
        hidden = torch.arange(scores.shape[1], device=scores.device) >= visible[:, None]
        scores = scores.masked_fill(hidden, -torch.inf)
        found = best_blocks(scores, visible.long(), config.candidate_block_size, config.candidate_topk_blocks)
        return functional.pad(found, (config.candidate_topk_blocks - found.shape[1], 0), value=-1).int()


def _within(index: Index, blocks: Tensor, block: int) -> Index:
    """The same over candidate blocks of each row; rows share no pass, since each has blocks of its own."""
    rows = torch.arange(len(blocks), dtype=torch.int32, device=blocks.device)
    return replace(
        index,
        length=blocks.shape[1] * block,
        group_slots=index.slots,
        group_firsts=rows,
        group_counts=torch.ones_like(rows),
        blocks=blocks,
        block=block,
    )


def _parts(index: Index, starts: list[int], rows: int) -> Iterator[tuple[Index, slice]]:
    """The index in stretches of whole groups with at most `SCORES` scores (at least one group) each."""
    if index.blocks is not None:
        starts = list(range(rows))
    most = max(SHARED_ROWS, SCORES // max(1, index.length))
    if starts and rows <= most:
        yield index, slice(0, rows)
        return
    first = 0
    while first < len(starts):
        last = first + 1
        while last < len(starts) and (starts[last + 1] if last + 1 < len(starts) else rows) - starts[first] <= most:
            last += 1
        begin, end = starts[first], starts[last] if last < len(starts) else rows
        own = slice(begin, end)
        yield (
            replace(
                index,
                slots=index.slots[own],
                visible=index.visible[own],
                group_slots=index.group_slots[first:last],
                group_firsts=index.group_firsts[first:last] - begin,
                group_counts=index.group_counts[first:last],
                blocks=None if index.blocks is None else index.blocks[own],
            ),
            own,
        )
        first = last


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
