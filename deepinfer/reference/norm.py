"""Root-mean-square normalisation."""

import torch
from torch import Tensor, nn


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last axis: ``x * rsqrt(mean(x^2) + eps) * weight``, in FP32, cast once at the end.

    ``x`` [..., C] of any float dtype; ``weight`` [C]. Returns [..., C] in the dtype of ``x``.
    An all-zero row gives zeros, since FP32 holds the model's eps of 1e-20.
    """
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype)


class RMSNorm(nn.Module):
    """A learned `rms_norm` over ``size`` channels."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size], dtype kept."""
        return rms_norm(x, self.weight, self.eps)


class Linear(nn.Module):
    """A matrix product in the dtype of its input; the weight is cast on use, so one copy serves FP32 and BF16."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] -> [..., outputs], dtype kept."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return nn.functional.linear(x, self.weight.to(x.dtype), bias)
