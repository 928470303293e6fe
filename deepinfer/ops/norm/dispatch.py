"""Chooses the implementation by the arguments."""

from torch import Tensor

from deepinfer.ops.linear import Fp8Rows
from deepinfer.ops.norm import torch as reference
from deepinfer.ops.platform import accelerated


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., C] of any float dtype, weight FP32 [C] -> [..., C] in the dtype of x."""
    if accelerated(x):
        from deepinfer.ops.norm import triton

        rows = x if x.ndim == 2 and x.stride(1) == 1 else x.reshape(-1, x.shape[-1])
        return triton.rms_norm(rows, weight, eps).view(x.shape)
    return reference.rms_norm(x, weight, eps)


def rounded_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Fp8Rows:
    """x [N, C] of any float dtype, weight FP32 [C] -> rows [N, C]."""
    if accelerated(x) and x.stride(1) == 1:
        from deepinfer.ops.norm import triton

        return triton.rounded_rms_norm(x, weight, eps)
    return reference.rounded_rms_norm(x, weight, eps)
