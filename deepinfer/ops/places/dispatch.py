"""Chooses the implementation by where the arguments lie: a dozen small operators, or one kernel."""

from torch import Tensor

from deepinfer.ops.places import torch as reference
from deepinfer.ops.places.rows import SingleRows


def single_rows(
    positions: Tensor, slots: Tensor, lowest: Tensor, window: int, ring: int, plain: Tensor, compressed: Tensor
) -> SingleRows:
    """positions, slots, lowest int64 [M], plain, compressed FP32 [F]."""
    if positions.is_cuda:
        from deepinfer.ops.places import triton

        return triton.single_rows(positions, slots, lowest, window, ring, plain, compressed)
    return reference.single_rows(positions, slots, lowest, window, ring, plain, compressed)


def entry_rows(
    rows: Tensor, positions: Tensor, slots: Tensor, page_table: Tensor, page_size: int, ratio: int, freqs: Tensor
) -> tuple[Tensor, Tensor]:
    """rows int64 [W], positions, slots int64 [M], page_table int64 [S, C], freqs FP32 [F] -> int64 [W], [W, F]."""
    if rows.is_cuda:
        from deepinfer.ops.places import triton

        return triton.entry_rows(rows, positions, slots, page_table, page_size, ratio, freqs)
    return reference.entry_rows(rows, positions, slots, page_table, page_size, ratio, freqs)
