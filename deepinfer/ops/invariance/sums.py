"""Sums in a fixed order."""

import torch
from torch import Tensor

_LONGEST = 16384  # a CPU may spread a longer row over threads if it is the only one


def row_sums(x: Tensor) -> Tensor:
    """x FP32 [..., C] -> [..., 1]. A CPU adds a contiguous row in an order that follows from C."""
    if x.is_cuda:
        from deepinfer.ops.invariance import triton

        return triton.row_sums(x)
    if x.shape[-1] <= _LONGEST:
        return x.contiguous().sum(-1, keepdim=True)
    parts = [row_sums(part) for part in torch.split(x, _LONGEST, -1)]
    return ordered_sum(torch.cat(parts, -1), -1)[..., None]


def ordered_sum(x: Tensor, dim: int) -> Tensor:
    """The parts of x along `dim`, at least one, added one after another."""
    first, *others = x.unbind(dim)
    if not others:
        return first
    total = first + others[0]
    for part in others[1:]:
        total += part
    return total
