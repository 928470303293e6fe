"""The PyTorch version: defines the operators, on any device. Norm and rotation may be the batch-invariant ones."""

import torch
from torch import Tensor

from deepinfer.core.batch import Pairs
from deepinfer.ops.kv_formats import pack_index, pack_latent
from deepinfer.ops.norm import rms_norm
from deepinfer.ops.rope import rotate


def pool_pairs(values: Tensor, scores: Tensor) -> Tensor:
    """values, scores FP32 [W, 2, C] -> FP32 [W, C]."""
    return (scores.softmax(1) * values).sum(1)


def keep_rows(made: Tensor, pending: Tensor, kept: Tensor, slots: Tensor, positions: Tensor) -> None:
    """made FP32 [N, 2, C], pending FP32 [slots, ring, 2, C], kept int64 [Y], slots, positions int64 [N]."""
    pending[slots[kept], _places(positions[kept], pending)] = made[kept]


def partners(made: Tensor, pending: Tensor, pairs: Pairs) -> tuple[Tensor, Tensor]:
    """made FP32 [N, 2, C], pending FP32 [slots, ring, 2, C] -> values and scores of both tokens, FP32 [W, 2, C]."""
    earlier = pending[pairs.pending_slots, _places(pairs.pending_positions, pending)]
    both = torch.stack((torch.cat((made, earlier))[pairs.partners], made[pairs.rows]), dim=1)
    return both[:, :, 0], both[:, :, 1]


def latent_rows(
    x: Tensor, norm: Tensor, turns: Tensor, eps: float, dtype: torch.dtype, out: Tensor, places: Tensor | None
) -> Tensor:
    """x FP32 [W, D], norm FP32 [D], turns complex64 [W, F] -> latents [W, D] of `dtype`."""
    latents = rms_norm(x.to(dtype), norm, eps)
    _write(out, pack_latent(rotate(latents, turns)), places)
    return latents


def key_rows(x: Tensor, norm: Tensor, turns: Tensor, eps: float, out: Tensor, places: Tensor | None) -> None:
    """x [W, d], norm FP32 [d], turns complex64 [W, F]."""
    _write(out, pack_index(rotate(rms_norm(x, norm, eps), turns)), places)


def _write(out: Tensor, rows: Tensor, places: Tensor | None) -> None:
    if places is None:
        out.copy_(rows)
    else:
        out.index_copy_(0, places, rows)


def _places(positions: Tensor, pending: Tensor) -> Tensor:
    """The even position p is kept at place (p // 2) % ring."""
    return (positions // 2).remainder(pending.shape[1])
