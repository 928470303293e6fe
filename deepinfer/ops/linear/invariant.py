"""The batch-invariant version."""

import torch
from torch import Tensor

from deepinfer.ops.invariance import product
from deepinfer.ops.linear.torch import quantize_rows
from deepinfer.ops.linear.weights import Fp8Rows, Fp8Weight, Weight


def linear(x: Tensor | Fp8Rows, weight: Weight) -> Tensor:
    """x [..., C], weight [R, C] -> [..., R] in the dtype of x."""
    if isinstance(weight, Tensor):
        assert isinstance(x, Tensor), "rounded rows are for quantised weights"
        return product(x, weight.T)
    rows, dtype = (quantize_rows(x), x.dtype) if isinstance(x, Tensor) else (x, torch.bfloat16)
    return fp8_product(*rows, weight).to(dtype)


def grouped_linear(x: Tensor | Fp8Rows, weight: Weight) -> Tensor:
    """x [N, G, C], weight [G, C, R] or FP8 [G, R, C] -> [N, G, R] in the dtype of x."""
    if isinstance(weight, Tensor):
        assert isinstance(x, Tensor), "rounded rows are for quantised weights"
        return torch.stack([product(x[:, group], weight[group]) for group in range(len(weight))], 1)
    (codes, scales), dtype = (quantize_rows(x), x.dtype) if isinstance(x, Tensor) else (x, torch.bfloat16)
    products = [fp8_product(codes[:, group], scales[:, group], weight[group]) for group in range(len(weight))]
    return torch.stack(products, 1).to(dtype)


def wide_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., C], weight [R, C], of any float dtypes -> FP32 [..., R]."""
    return product(x.float(), weight.float().T)


def fp8_product(codes: Tensor, scales: Tensor, weight: Fp8Weight) -> Tensor:
    """codes E4M3 [..., C], scales FP32 [...], weight [R, C] -> FP32 [..., R]."""
    return product(codes.float(), weight.codes.float().T) * weight.scales * scales[..., None]
