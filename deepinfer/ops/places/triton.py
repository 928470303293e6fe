"""One program a row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.ops.places.rows import SingleRows
from deepinfer.ops.triton import block, cosine, sine


@triton.jit
def _turn(position, freqs_ptr, out_ptr, pairs, PAIRS: tl.constexpr):
    """Cosines and sines of one position."""
    f = tl.arange(0, PAIRS)
    angle = position.to(tl.float32) * tl.load(freqs_ptr + f, mask=f < pairs, other=0.0)
    tl.store(out_ptr + 2 * f, cosine(angle), mask=f < pairs)
    tl.store(out_ptr + 2 * f + 1, sine(angle), mask=f < pairs)


@triton.jit
def _single_rows(positions_ptr, slots_ptr, lowest_ptr, plain_ptr, compressed_ptr, near_ptr, places_ptr, small_ptr,
                 turns_ptr, rows, window, ring, pairs, WINDOW: tl.constexpr, PAIRS: tl.constexpr):  # fmt: skip
    row = tl.program_id(0)
    position, slot = tl.load(positions_ptr + row), tl.load(slots_ptr + row)
    seen = position - tl.load(lowest_ptr + row) + 1
    distance = tl.arange(0, WINDOW)
    turned = (position - distance) % ring
    back = slot * ring + tl.where(turned < 0, turned + ring, turned)
    tl.store(
        near_ptr + row * window + distance, tl.where(distance < seen, back, -1).to(tl.int32), mask=distance < window
    )
    tl.store(places_ptr + row, slot * ring + position % ring)
    tl.store(small_ptr + row, slot.to(tl.int32))
    tl.store(small_ptr + rows + row, row)
    tl.store(small_ptr + 2 * rows + row, 1)
    _turn(position, plain_ptr, turns_ptr + row * 2 * pairs, pairs, PAIRS)
    _turn(position, compressed_ptr, turns_ptr + (rows + row) * 2 * pairs, pairs, PAIRS)


@triton.jit
def _entry_rows(rows_ptr, positions_ptr, slots_ptr, table_ptr, freqs_ptr, places_ptr, turns_ptr, stride, page_size,
                ratio, pairs, PAIRS: tl.constexpr):  # fmt: skip
    w = tl.program_id(0)
    row = tl.load(rows_ptr + w)
    last = tl.load(positions_ptr + row)
    page = tl.load(table_ptr + tl.load(slots_ptr + row) * stride + last // page_size)
    tl.store(places_ptr + w, page * (page_size // ratio) + last % page_size // ratio)
    _turn(last - (ratio - 1), freqs_ptr, turns_ptr + w.to(tl.int64) * 2 * pairs, pairs, PAIRS)


def single_rows(
    positions: Tensor, slots: Tensor, lowest: Tensor, window: int, ring: int, plain: Tensor, compressed: Tensor
) -> SingleRows:
    """positions, slots, lowest int64 [M], plain, compressed FP32 [F]."""
    rows, pairs, device = len(positions), len(plain), positions.device
    near = torch.empty(rows, window, dtype=torch.int32, device=device)
    places = torch.empty(rows, dtype=torch.int64, device=device)
    small = torch.empty(3, rows, dtype=torch.int32, device=device)
    turns = torch.empty(2, rows, pairs, dtype=torch.complex64, device=device)
    if rows:
        _single_rows[(rows,)](
            positions, slots, lowest, plain, compressed, near, places, small, torch.view_as_real(turns), rows, window,
            ring, pairs, WINDOW=block(window), PAIRS=block(pairs),
        )  # fmt: skip
    return SingleRows(near, places, *small, *turns)


def entry_rows(
    rows: Tensor, positions: Tensor, slots: Tensor, page_table: Tensor, page_size: int, ratio: int, freqs: Tensor
) -> tuple[Tensor, Tensor]:
    """rows int64 [W], positions, slots int64 [M], page_table int64 [S, C], freqs FP32 [F] -> int64 [W], [W, F]."""
    places = torch.empty(len(rows), dtype=torch.int64, device=rows.device)
    turns = torch.empty(len(rows), len(freqs), dtype=torch.complex64, device=rows.device)
    if len(rows):
        _entry_rows[(len(rows),)](
            rows, positions, slots, page_table, freqs, places, torch.view_as_real(turns), page_table.stride(0),
            page_size, ratio, len(freqs), PAIRS=block(len(freqs)),
        )  # fmt: skip
    return places, turns
