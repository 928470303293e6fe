"""The PyTorch version: defines the operators, on any device."""

import torch
from torch import Tensor

from deepinfer.ops.places.rows import SingleRows
from deepinfer.ops.rope import rotations


def single_rows(
    positions: Tensor, slots: Tensor, lowest: Tensor, window: int, ring: int, plain: Tensor, compressed: Tensor
) -> SingleRows:
    """positions, slots, lowest int64 [M], plain, compressed FP32 [F]."""
    firsts = torch.arange(len(positions), dtype=torch.int32, device=positions.device)
    distance = torch.arange(window, device=positions.device)
    base = slots * ring
    back = base[:, None] + (positions[:, None] - distance).remainder(ring)
    seen = positions - lowest + 1
    return SingleRows(
        near=torch.where(distance < seen[:, None], back, -1).int(),
        places=base + positions.remainder(ring),
        slots=slots.int(),
        firsts=firsts,
        counts=torch.ones_like(firsts),
        plain=rotations(positions, plain),
        compressed=rotations(positions, compressed),
    )


def entry_rows(
    rows: Tensor, positions: Tensor, slots: Tensor, page_table: Tensor, page_size: int, ratio: int, freqs: Tensor
) -> tuple[Tensor, Tensor]:
    """rows int64 [W], positions, slots int64 [M], page_table int64 [S, C], freqs FP32 [F] -> int64 [W], [W, F]."""
    last = positions[rows]
    pages = page_table[slots[rows], last // page_size]
    return pages * (page_size // ratio) + last % page_size // ratio, rotations(last - (ratio - 1), freqs)
