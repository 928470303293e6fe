"""Chooses the implementation by the arguments."""

from torch import Tensor

from deepinfer.ops.platform import accelerated
from deepinfer.ops.router import torch as reference


def route(h: Tensor, weight: Tensor, bias: Tensor, count: int, scaling: float) -> tuple[Tensor, Tensor]:
    """h [N, H] of any float dtype -> (chosen experts int64 [N, count], weights FP32 [N, count])."""
    if accelerated(h):
        from deepinfer.ops.router import triton

        return triton.choose(triton.logits(h.contiguous(), weight), bias, count, scaling)
    return reference.route(h, weight, bias, count, scaling)
