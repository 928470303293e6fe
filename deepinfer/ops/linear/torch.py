"""The PyTorch version: defines the operators, on any device."""

import torch
from torch import Tensor
from torch.nn import functional

from deepinfer.ops.linear.weights import Fp8Rows, Fp8Weight

_E4M3_MAX = 448.0
_TINY = 2.0**-100  # stands for the largest magnitude of a row of zeros


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., C], weight [R, C] -> [..., R] in the dtype of x."""
    return functional.linear(x, weight)


def grouped_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [N, G, C], weight [G, C, R] -> [N, G, R] in the dtype of x."""
    return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1)


def fp8_linear(x: Fp8Rows, weight: Fp8Weight, dtype: torch.dtype) -> Tensor:
    """x [..., C], weight [R, C] -> [..., R] of `dtype`."""
    return fp8_product(*x, weight).to(dtype)


def fp8_grouped_linear(x: Fp8Rows, weight: Fp8Weight, dtype: torch.dtype) -> Tensor:
    """x [N, G, C], weight [G, R, C] -> [N, G, R] of `dtype`."""
    groups = range(len(weight))
    return torch.stack([fp8_product(x.codes[:, g], x.scales[:, g], weight[g]) for g in groups], 1).to(dtype)


def wide_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., C], weight [R, C], of any float dtypes -> FP32 [..., R]."""
    return functional.linear(x.float(), weight.float())


def quantize_rows(x: Tensor) -> Fp8Rows:
    """x [..., C] of any float dtype."""
    wide = x.float()
    least = wide.abs().amax(-1).clamp(min=_TINY) / _E4M3_MAX
    scales = ((least.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)  # any mantissa bit carries
    codes = (wide / scales[..., None]).clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn)
    return Fp8Rows(codes, scales)


def fp8_product(codes: Tensor, scales: Tensor, weight: Fp8Weight) -> Tensor:
    """codes E4M3 [..., C], scales FP32 [...], weight [R, C] -> FP32 [..., R]."""
    return functional.linear(codes.float(), weight.codes.float()) * weight.scales * scales[..., None]
