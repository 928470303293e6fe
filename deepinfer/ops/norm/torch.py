"""The PyTorch version: defines the operator, on any device."""

import torch
from torch import Tensor

from deepinfer.ops.linear import Fp8Rows, quantize_rows


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., C] of any float dtype, weight FP32 [C] -> [..., C] in the dtype of x."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight).to(x.dtype)


def rounded_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Fp8Rows:
    """x [N, C] of any float dtype, weight FP32 [C] -> rows [N, C]."""
    return quantize_rows(rms_norm(x, weight, eps))
