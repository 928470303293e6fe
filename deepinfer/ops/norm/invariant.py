"""The batch-invariant version."""

from torch import Tensor

from deepinfer.ops.invariance import row_sums
from deepinfer.ops.linear import Fp8Rows, quantize_rows


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., C] of any float dtype, weight FP32 [C] -> [..., C] in the dtype of x."""
    wide = x.float()
    mean = row_sums(wide.square()) * (1 / x.shape[-1])
    return (wide * mean.add_(eps).sqrt_().reciprocal_() * weight).to(x.dtype)


def rounded_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Fp8Rows:
    """x [N, C] of any float dtype, weight FP32 [C] -> rows [N, C]."""
    return quantize_rows(rms_norm(x, weight, eps))
