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
    rows, dtype = _rounded(x)
    if rows.codes.is_cuda:
        from deepinfer.ops.linear import triton

        return triton.linear(rows, weight).to(dtype)
    return reference.fp8_linear(rows, weight, dtype)


def grouped_linear(x: Tensor | Fp8Rows, weight: Weight) -> Tensor:
    """x [N, G, C], weight [G, C, R] or FP8 [G, R, C] -> [N, G, R]."""
    if isinstance(weight, Tensor):
        assert isinstance(x, Tensor), "rounded rows are for quantised weights"
        return reference.grouped_linear(x, weight)
    rows, dtype = _rounded(x)
    if rows.codes.is_cuda:
        from deepinfer.ops.linear import triton

        return triton.grouped_linear(rows, weight).to(dtype)
    return reference.fp8_grouped_linear(rows, weight, dtype)


def quantize_rows(x: Tensor) -> Fp8Rows:
    """x [..., C] of any float dtype, rounded."""
    if x.is_cuda:
        from deepinfer.ops.linear import triton

        return triton.quantize_rows(x)
    return reference.quantize_rows(x)


def wide_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., C], weight [R, C] -> FP32 [..., R]."""
    if accelerated(x) and weight.dtype is torch.bfloat16:  # products of BF16 are exact, and the sums are FP32
        made = torch.mm(x.reshape(-1, x.shape[-1]), weight.t(), out_dtype=torch.float32)
        return made.view(*x.shape[:-1], len(weight))
    return reference.wide_linear(x, weight)


def _rounded(x: Tensor | Fp8Rows) -> tuple[Fp8Rows, torch.dtype]:
    """The rows as products take them, and the dtype of the result: that of x, or BF16 if x is rounded already."""
    return (quantize_rows(x), x.dtype) if isinstance(x, Tensor) else (x, torch.bfloat16)
