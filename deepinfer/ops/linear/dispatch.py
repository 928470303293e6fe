"""Chooses the implementation by the arguments."""

import torch
from torch import Tensor

from deepinfer.ops.linear import torch as reference
from deepinfer.ops.linear.weights import Fp8Rows, Weight
from deepinfer.ops.platform import accelerated


def linear(x: Tensor | Fp8Rows, weight: Weight) -> Tensor:
    """x [..., C], weight [R, C] -> [..., R]."""
    if isinstance(weight, Tensor):
        assert isinstance(x, Tensor), "rounded rows are for quantised weights"
        return reference.linear(x, weight)
    rows = quantize_rows(x) if isinstance(x, Tensor) else x
    if rows.codes.is_cuda:
        from deepinfer.ops.linear import triton

        return triton.linear(rows, weight).to(x.dtype if isinstance(x, Tensor) else torch.bfloat16)
    return reference.fp8_linear(rows, weight, x.dtype if isinstance(x, Tensor) else torch.bfloat16)


def grouped_linear(x: Tensor | Fp8Rows, weight: Weight) -> Tensor:
    """x [N, G, C], weight [G, C, R] or FP8 [G, R, C] -> [N, G, R]."""
    if isinstance(weight, Tensor):
        assert isinstance(x, Tensor), "rounded rows are for quantised weights"
        return reference.grouped_linear(x, weight)
    rows = quantize_rows(x) if isinstance(x, Tensor) else x
    if rows.codes.is_cuda:
        from deepinfer.ops.linear import triton

        return triton.grouped_linear(rows, weight).to(x.dtype if isinstance(x, Tensor) else torch.bfloat16)
    return reference.fp8_grouped_linear(rows, weight, x.dtype if isinstance(x, Tensor) else torch.bfloat16)


def quantize_rows(x: Tensor) -> Fp8Rows:
    """x [..., C] of any float dtype, rounded."""
    if x.is_cuda:
        from deepinfer.ops.linear import triton

        return triton.quantize_rows(x)
    return reference.quantize_rows(x)


def wide_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., C], weight [R, C] -> FP32 [..., R]."""
    if accelerated(x) and weight.dtype is torch.bfloat16:  # products of BF16 are exact, and the sums are FP32
        return torch.mm(x.reshape(-1, x.shape[-1]), weight.t(), out_dtype=torch.float32).view(*x.shape[:-1], -1)
    return reference.wide_linear(x, weight)
