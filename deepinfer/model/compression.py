"""Compressed KV: a source layer turns its inputs into latents and index keys and writes them to their pages."""

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.cache.storage import Caches
from deepinfer.config.model import ModelConfig
from deepinfer.core.batch import Batch
from deepinfer.model.weights import AttentionWeights, CompressorWeights
from deepinfer.ops.cache_rows import store_rows
from deepinfer.ops.compressor import keep_rows, key_rows, latent_rows, pool_rows
from deepinfer.ops.linear import linear, wide_linear
from deepinfer.ops.places import entry_rows
from deepinfer.ops.rope import rotations


@dataclass(frozen=True)
class Due:
    """The entries of one ratio that a step completes and that are to be written: the same for all sources of the ratio.

    rows: int64 [W], of the step, each the last token of its entry. turns: complex64 [W, F], rotations of the entries.
    places: int64 [A], the entries' addresses; where ranks share the rows those of the whole step.
    """

    rows: Tensor
    turns: Tensor
    places: Tensor


def due_entries(ratio: int, freqs: Tensor, batch: Batch, caches: Caches) -> Due:
    """freqs: FP32 [F], of compressed layers."""
    rows = _completing(batch, ratio)
    whole = batch if batch.shared is None else batch.shared.whole
    last, half = _completing(whole, ratio), whole.encoder
    place = half.positions, half.slots, caches.page_table, caches.page_size, ratio
    places, turns = entry_rows(last, *place, freqs)
    if batch.shared is not None:
        turns = rotations(batch.encoder.positions[rows] - (ratio - 1), freqs)
    return Due(rows, turns, places)


def _completing(batch: Batch, ratio: int) -> Tensor:
    return batch.singles if ratio == 1 else batch.pairs.rows


def compress(
    h: Tensor, layer: int, weights: AttentionWeights, due: Due, batch: Batch, caches: Caches, config: ModelConfig
) -> None:
    """Write the entries that the step's rows complete and that are due.

    h: normed inputs [N, H] of a KV source, all rows of the step. Changes the source's pages in `caches` and, with ratio
    2, its pending pairs.
    """
    assert weights.compressor is not None
    assert weights.index_keys is not None
    source, ratio, eps = config.kv_source_layer_ids.index(layer), config.ratio(layer), config.rms_norm_eps
    written = caches.latents[source].flatten(0, 1), caches.index_keys[source].flatten(0, 1)
    if ratio == 1:
        pooled = wide_linear(h[due.rows], weights.compressor.inputs)
    else:
        pending = caches.pairs[caches.layout.pair_layers.index(layer)]
        pooled = _pool(h, weights.compressor, batch, pending)
    shared, places = batch.shared, due.places if batch.shared is None else None
    to = written if shared is None else [_rows_like(cache, len(due.rows)) for cache in written]
    latents = latent_rows(pooled, weights.compressor.norm, due.turns, eps, h.dtype, to[0], places)
    keys = linear(latents, weights.index_keys.wk)
    key_rows(keys, weights.index_keys.norm, due.turns, eps, to[1], places)
    if shared is not None:
        gathered = (shared.singles if ratio == 1 else shared.pairs)(torch.cat(list(to), 1))
        parts = torch.split(gathered, [part.shape[1] for part in to], 1)
        for cache, entries in zip(written, parts, strict=True):
            store_rows(cache, due.places, entries)


def _rows_like(cache: Tensor, count: int) -> Tensor:
    return torch.empty(count, cache.shape[1], dtype=cache.dtype, device=cache.device)


def _pool(h: Tensor, weights: CompressorWeights, batch: Batch, pending: Tensor) -> Tensor:
    """Latents before their norm, FP32 [W, D]; keeps in `pending` [slots, pair ring, 2, D] what may be needed later."""
    made = wide_linear(h, weights.inputs).view(len(h), 2, -1)
    pooled = pool_rows(made, pending, batch.pairs, h.dtype)
    if batch.shared is None:
        keep_rows(made, pending, batch.pairs.kept, batch.encoder.slots, batch.encoder.positions)
    else:
        whole, made = batch.shared.whole, batch.shared.kept(made[batch.pairs.kept])
        kept, half = whole.pairs.kept, whole.encoder
        keep_rows(made, pending, torch.arange(len(kept), device=kept.device), half.slots[kept], half.positions[kept])
    return pooled
