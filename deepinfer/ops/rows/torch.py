"""The PyTorch version: defines the operators, on any device."""

import torch
from torch import Tensor

from deepinfer.checkpoint.formats import index_mxfp4
from deepinfer.ops.cache_rows import load_rows
from deepinfer.ops.indexer import best_positions, block_positions, row_scores
from deepinfer.ops.kv_formats import pack_window, unpack_index
from deepinfer.ops.linear import Weight, grouped_linear, linear
from deepinfer.ops.norm.torch import rms_norm
from deepinfer.ops.rope.torch import rotate
from deepinfer.ops.rows.index import Index
from deepinfer.ops.sparse_attention.torch import attend_rows


def window_rows(
    x: Tensor, norm: Tensor, turns: Tensor, eps: float, places: Tensor, packed: Tensor, ring: Tensor
) -> None:
    """x [M, D], norm FP32 [D], turns complex64 [M, F], places int64 [M] -> packed uint8 [M, row], ring [A, row]."""
    packed.copy_(pack_window(rotate(rms_norm(x, norm, eps), turns)))
    kept = places >= 0
    # Rows without a place do what the first one with a place does, or nothing new: no shape depends on their number.
    first = kept.int().argmax(0, keepdim=True)
    place = places[first].clamp(min=0)
    same = torch.where(kept[first][:, None], packed[first], ring[place])
    ring.index_copy_(0, torch.where(kept, places, place), torch.where(kept[:, None], packed, same))


def attend(
    q: Tensor,
    turns: Tensor,
    windows: Tensor,
    near: Tensor,
    latents: Tensor | None,
    chosen: Tensor | None,
    sink: Tensor,
) -> Tensor:
    """q [M, h, D], turns complex64 [M, F], near [M, W], chosen [M, K], sink [h] -> [M, h, D] in the dtype of q."""
    return attend_rows(rotate(q, turns[:, None]), windows, near, latents, chosen, sink).to(q.dtype)


def output(o: Tensor, turns: Tensor, wo_a: Weight, wo_b: Weight) -> Tensor:
    """o [M, h, D], turns complex64 [M, F] -> [M, H]."""
    back = rotate(o, turns[:, None].conj())
    return linear(grouped_linear(back.reshape(len(o), len(wo_a), -1), wo_a).flatten(1), wo_b)


def index_scores(q: Tensor, turns: Tensor, weights: Tensor, factor: float, index: Index) -> Tensor:
    """q [M, h, d], turns complex64 [M, F], weights [M, h] -> FP32 [M, length]."""
    rounded = index_mxfp4(rotate(q, turns[:, None]))
    places = torch.arange(index.length, dtype=torch.int32, device=q.device).expand(len(q), -1)
    if index.blocks is not None:
        places = block_positions(index.blocks, index.block)
    places = places.masked_fill(places >= index.visible[:, None], -1)
    keys = unpack_index(load_rows(index.keys, entry_rows(places, index).long(), places >= 0), q.dtype)
    scores = row_scores(rounded[None], keys[None], (weights * factor)[None])[0]
    return scores.masked_fill(places < 0, -torch.inf)


def best_entries(scores: Tensor, index: Index, count: int) -> Tensor:
    """scores FP32 [M, length] -> int32 [M, count]."""
    columns = torch.arange(scores.shape[1], device=scores.device)
    hidden = (columns >= index.visible[:, None]) if index.blocks is None else scores == -torch.inf
    found = best_positions(scores.masked_fill(hidden, -torch.inf), count)
    chosen = torch.nn.functional.pad(found, (0, count - found.shape[1]), value=-1).int()
    if index.blocks is None:
        return entry_rows(chosen, index)
    listed = index.blocks.gather(1, (chosen.clamp(min=0) // index.block).long())
    inside = listed * index.block + chosen % index.block
    return entry_rows(torch.where(chosen >= 0, inside, -1), index)


def entry_rows(entries: Tensor, index: Index) -> Tensor:
    """entries int32 [M, K] -> int32 [M, K]."""
    safe = entries.clamp(min=0).long()
    pages = index.page_table[index.slots.long()[:, None], safe // index.entries]
    return torch.where(entries >= 0, pages * index.entries + safe % index.entries, -1).int()
