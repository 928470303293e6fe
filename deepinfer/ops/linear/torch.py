"""The PyTorch version: defines the operators, on any device."""

import torch
from torch import Tensor
from torch.nn import functional

from deepinfer.ops.linear.weights import Fp8Weight, Weight

_E4M3_MAX = 448.0
_TINY = 2.0**-100  # stands for the largest magnitude of a row of zeros


def linear(x: Tensor, weight: Weight) -> Tensor:
    """x [..., C], weight [R, C] -> [..., R] in the dtype of x."""
    if isinstance(weight, Tensor):
        return functional.linear(x, weight)
    return fp8_product(*quantize_rows(x), weight).to(x.dtype)


def grouped_linear(x: Tensor, weight: Weight) -> Tensor:
    """x [N, G, C], weight [G, C, R] or FP8 [G, R, C] -> [N, G, R] in the dtype of x."""
    if isinstance(weight, Tensor):
        return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1)
    codes, scales = quantize_rows(x)
    products = [fp8_product(codes[:, group], scales[:, group], weight[group]) for group in range(len(weight))]
    return torch.stack(products, 1).to(x.dtype)


def wide_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., C], weight [R, C], of any float dtypes -> FP32 [..., R]."""
    return functional.linear(x.float(), weight.float())


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., C] of any float dtype -> (E4M3 [..., C], FP32 [...])."""
    wide = x.float()
    least = wide.abs().amax(-1).clamp(min=_TINY) / _E4M3_MAX
    scales = ((least.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)  # any mantissa bit carries
    codes = (wide / scales[..., None]).clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn)
    return codes, scales


def fp8_product(codes: Tensor, scales: Tensor, weight: Fp8Weight) -> Tensor:
    """codes E4M3 [..., C], scales FP32 [...], weight [R, C] -> FP32 [..., R]."""
    return functional.linear(codes.float(), weight.codes.float()) * weight.scales * scales[..., None]
