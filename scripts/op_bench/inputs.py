"""Random data of the released model's sizes, on the GPU."""

import torch
from torch import Tensor

from deepinfer.ops.linear import Fp8Weight
from deepinfer.ops.rope import frequencies, rotations

HIDDEN, WIDTH, EXPERTS, HEADS, DIM = 5120, 2304, 48, 64, 512
L2_BYTES = 6e7


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """On the GPU."""
    return torch.randn(*shape, device="cuda").to(dtype)


def turns(rows: int, pairs: int = 32) -> Tensor:
    """Rotations of consecutive positions."""
    return rotations(torch.arange(rows, device="cuda"), frequencies(2 * pairs, 10000.0).cuda())


def fp8_weight(*shape: int) -> Fp8Weight:
    """Random, with the sizes of stored ones."""
    return Fp8Weight(
        (randn(*shape, dtype=torch.float32) * 96).clamp(-448, 448).to(torch.float8_e4m3fn),
        torch.full(shape[:-1], 2.0**-12, device="cuda"),
    )
