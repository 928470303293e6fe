"""Chooses the implementation by the arguments."""

import torch
from torch import Tensor

from deepinfer.core.batch import Pairs
from deepinfer.ops.compressor import torch as reference
from deepinfer.ops.platform import accelerated


def latent_rows(
    x: Tensor, norm: Tensor, turns: Tensor, eps: float, dtype: torch.dtype, out: Tensor, places: Tensor | None = None
) -> Tensor:
    """x FP32 [W, D], norm FP32 [D], turns complex64 [W, F] -> latents [W, D] of `dtype`."""
    if x.is_cuda and dtype is torch.bfloat16:
        from deepinfer.ops.compressor import triton

        return triton.latent_rows(x, norm, turns, eps, out, places)
    return reference.latent_rows(x, norm, turns, eps, dtype, out, places)


def key_rows(x: Tensor, norm: Tensor, turns: Tensor, eps: float, out: Tensor, places: Tensor | None = None) -> None:
    """x [W, d], norm FP32 [d], turns complex64 [W, F]."""
    if accelerated(x):
        from deepinfer.ops.compressor import triton

        triton.key_rows(x, norm, turns, eps, out, places)
    else:
        reference.key_rows(x, norm, turns, eps, out, places)


def pool_rows(made: Tensor, pending: Tensor, pairs: Pairs, dtype: torch.dtype) -> Tensor:
    """made FP32 [N, 2, C], pending FP32 [slots, ring, 2, C] -> FP32 [W, C]; `dtype` is that of the model."""
    if made.is_cuda and dtype is torch.bfloat16:
        from deepinfer.ops.compressor import triton

        return triton.pool_rows(made, pending, pairs)
    return reference.pool_pairs(*reference.partners(made, pending, pairs))


def keep_rows(made: Tensor, pending: Tensor, kept: Tensor, slots: Tensor, positions: Tensor) -> None:
    """made FP32 [N, 2, C], pending FP32 [slots, ring, 2, C], kept int64 [Y], slots, positions int64 [N]."""
    if made.is_cuda:
        from deepinfer.ops.compressor import triton

        triton.keep_rows(made, pending, kept, slots, positions)
    else:
        reference.keep_rows(made, pending, kept, slots, positions)
