"""Functions of single elements, computed by the same code wherever an element lies.

On a CPU PyTorch computes whole vectors with one routine and what is left at the end of a stretch with another, whose
last bit may differ. A stretch ends where the tensor does, or where the next thread's part begins.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

LANES = 32
"""A multiple of the FP32 elements that any vector loop takes at once: two vectors of 512 bits."""

_SERIAL = 32768
"""Below this many elements PyTorch uses one thread."""


def elementwise(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`function` of every element of x, FP32 of any shape; contiguous."""
    if x.device.type != "cpu":
        return function(x)
    flat = x.contiguous().view(-1)
    if rest := x.numel() % LANES:
        return _applied(function, functional.pad(flat, (0, LANES - rest)))[: x.numel()].view(x.shape)
    return _applied(function, flat).view(x.shape)


def _applied(function: Callable[[Tensor], Tensor], flat: Tensor) -> Tensor:
    if flat.shape[0] < _SERIAL or torch.get_num_threads() == 1:
        return function(flat)
    return torch.cat([function(part) for part in torch.split(flat, _SERIAL - LANES)])
