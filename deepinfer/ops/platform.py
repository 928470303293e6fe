"""Which implementation of an operator runs: by where its arguments lie, and in which type they are."""

import torch
from torch import Tensor


def accelerated(x: Tensor) -> bool:
    """Whether rows `x` take the kernels: BF16 on an NVIDIA GPU. FP32 keeps the PyTorch operators, which are exact."""
    return x.is_cuda and x.dtype is torch.bfloat16
