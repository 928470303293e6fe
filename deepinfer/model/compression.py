"""Compressed KV: a source layer turns its inputs into latents and index keys and writes them to their pages."""

import torch
from torch import Tensor

from deepinfer.cache.storage import Caches
from deepinfer.config.model import ModelConfig
from deepinfer.core.batch import Batch
from deepinfer.model.entries import entry_addresses
from deepinfer.model.weights import AttentionWeights, CompressorWeights, IndexKeyWeights
from deepinfer.ops.cache_rows import store_rows
from deepinfer.ops.compressor import pool_pairs
from deepinfer.ops.kv_formats import pack_index, pack_latent
from deepinfer.ops.linear import linear, wide_linear
from deepinfer.ops.norm import rms_norm
from deepinfer.ops.rope import rotate, rotations


def compress(
    h: Tensor, layer: int, weights: AttentionWeights, freqs: Tensor, batch: Batch, caches: Caches, config: ModelConfig
) -> None:
    """Write the entries that the step's rows complete and that are due.

    h: normed inputs [N, H] of a KV source, all rows of the step. freqs: FP32 [F] of compressed layers. Changes the
    source's pages in `caches` and, with ratio 2, its pending pairs.
    """
    assert weights.compressor is not None
    assert weights.index_keys is not None
    shared, whole = batch.shared, batch if batch.shared is None else batch.shared.whole
    source, ratio = config.kv_source_layer_ids.index(layer), config.ratio(layer)
    rows = batch.singles if ratio == 1 else batch.pairs.rows
    if ratio == 1:
        pooled = wide_linear(h[rows], weights.compressor.inputs)
    else:
        pending = caches.pairs[caches.layout.pair_layers.index(layer)]
        pooled = _pool(h, weights.compressor, batch, pending)
    latents = rms_norm(pooled.to(h.dtype), weights.compressor.norm, config.rms_norm_eps)
    turns = rotations(batch.encoder.positions[rows] - (ratio - 1), freqs)
    keys = _index_keys(latents, weights.index_keys, config.rms_norm_eps)
    entries, keys = pack_latent(rotate(latents, turns)), pack_index(rotate(keys, turns))
    if shared is not None:
        gather = shared.singles if ratio == 1 else shared.pairs
        entries, keys = torch.split(gather(torch.cat((entries, keys), 1)), [entries.shape[1], keys.shape[1]], 1)
        rows = whole.singles if ratio == 1 else whole.pairs.rows
    half = whole.encoder
    addresses = entry_addresses(caches.page_table, half.slots[rows], half.positions[rows], caches.page_size, ratio)
    store_rows(caches.latents[source].flatten(0, 1), addresses, entries)
    store_rows(caches.index_keys[source].flatten(0, 1), addresses, keys)


def _index_keys(latents: Tensor, weights: IndexKeyWeights, eps: float) -> Tensor:
    return rms_norm(linear(latents, weights.wk), weights.norm, eps)


def _pool(h: Tensor, weights: CompressorWeights, batch: Batch, pending: Tensor) -> Tensor:
    """Latents before their norm, FP32 [W, D]; keeps in `pending` [slots, pair ring, 2, D] what may be needed later."""
    pairs = batch.pairs
    made = wide_linear(h, weights.inputs).view(len(h), 2, -1)
    earlier = pending[pairs.pending_slots, _pair_places(pairs.pending_positions, pending)]
    known = torch.cat((made, earlier))
    both = torch.stack((known[pairs.partners], made[pairs.rows]), dim=1)
    _keep(pending, made[pairs.kept], batch)
    return pool_pairs(both[:, :, 0], both[:, :, 1])


def _keep(pending: Tensor, made: Tensor, batch: Batch) -> None:
    if batch.shared is not None:
        made, batch = batch.shared.kept(made), batch.shared.whole
    kept, half = batch.pairs.kept, batch.encoder
    pending[half.slots[kept], _pair_places(half.positions[kept], pending)] = made


def _pair_places(positions: Tensor, pending: Tensor) -> Tensor:
    """The even position p is kept at place (p // 2) % ring."""
    return (positions // 2).remainder(pending.shape[1])
