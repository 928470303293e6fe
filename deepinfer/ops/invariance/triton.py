"""The GPU's kernels: one tile shape and one order, whatever the number of rows.

A kernel converts BF16 to FP32 right after a load where Triton's CPU interpreter runs it, which computes BF16 wrongly.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS, INNER = 64, 64, 32
"""The tile of a product, and the terms of its sums that are taken at once."""

_SUMMED = 1024

_WIDE = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit(do_not_specialize=["m", "n", "tiles_m", "tiles_n"])
def _product(
    a_ptr, b_ptr, c_ptr, m, n, k, a_item, a_row, a_inner, b_item, b_inner, b_column, tiles_m, tiles_n,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    item = (tile // (tiles_m * tiles_n)).to(tl.int64)
    rows = (tile // tiles_n % tiles_m).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = (tile % tiles_n).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    a_ptr += item * a_item + rows[:, None] * a_row
    b_ptr += item * b_item + columns[None, :] * b_column
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, k, INNER):
        inner = first + tl.arange(0, INNER).to(tl.int64)
        a = tl.load(a_ptr + inner[None, :] * a_inner, mask=(rows < m)[:, None] & (inner < k)[None, :], other=0.0)
        b = tl.load(b_ptr + inner[:, None] * b_inner, mask=(inner < k)[:, None] & (columns < n)[None, :], other=0.0)
        if _WIDE:
            a, b = a.to(tl.float32), b.to(tl.float32)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    place = c_ptr + (item * m + rows[:, None]) * n + columns[None, :]
    tl.store(place, acc.to(c_ptr.dtype.element_ty), mask=(rows < m)[:, None] & (columns < n)[None, :])


@triton.jit
def _row_sums(x_ptr, out_ptr, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    acc = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, columns, BLOCK):
        place = first + tl.arange(0, BLOCK)
        acc += tl.load(x_ptr + row * columns + place, mask=place < columns, other=0.0)
    tl.store(out_ptr + row, tl.sum(acc, 0))


def product(a: Tensor, b: Tensor) -> Tensor:
    """a [..., K] and b [K, N], or a [B, M, K] and b [B, K, N] of any strides -> [..., N], in their dtype; FP32 sums."""
    items = a if b.dim() == 3 else a.reshape(1, -1, a.shape[-1])
    count, rows, inner = items.shape
    columns = b.shape[-1]
    out = torch.empty(count, rows, columns, dtype=a.dtype, device=a.device)
    tiles = triton.cdiv(rows, ROWS), triton.cdiv(columns, COLUMNS)
    if out.numel():
        b_item = b.stride(0) if b.dim() == 3 else 0
        _product[(count * tiles[0] * tiles[1],)](
            items, b, out, rows, columns, inner, *items.stride(), b_item, *b.stride()[-2:], *tiles, ROWS, COLUMNS, INNER
        )
    return out.view(*a.shape[:-1], columns)


def row_sums(x: Tensor) -> Tensor:
    """x FP32 [..., C] -> [..., 1]."""
    x = x.contiguous()
    out = torch.empty(*x.shape[:-1], 1, dtype=x.dtype, device=x.device)
    if out.numel():
        _row_sums[(out.numel(),)](x, out, x.shape[-1], BLOCK=_SUMMED)
    return out
