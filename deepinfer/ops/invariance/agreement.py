"""Which shapes of a library's product of matrices give the same bits.

A kernel's order of summation cannot be asked for, but seen: the products of these tests cancel, so that all that is
left of a sum is the rounding of its order. An order, a kernel or a place in a tile that differs shows in the bits.
Answers hold for a process: a shape, a layout, a type, a number of threads.
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

_TRIES = 2
REFERENCE_COLUMNS = 64


class Layout(NamedTuple):
    """What a library may choose a kernel by, the number of rows and items aside.

    shape: of the second matrix, [K, N]. strides: its two. offset: bytes that it lies behind a multiple of 64.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype


class Item(NamedTuple):
    """The same of a batched product: [rows, inner] times [inner, ...], whose columns are contiguous if `turned`."""

    rows: int
    inner: int
    turned: bool
    dtype: torch.dtype


def layout_of(b: Tensor) -> Layout:
    """The layout of a matrix [K, N]."""
    return Layout(b.shape, b.stride(), b.data_ptr() % 64, b.dtype)


@cache
def agreeing_rows(sizes: tuple[int, ...], layout: Layout, threads: int) -> tuple[int, ...]:
    """Those of `sizes` for which each row of `mm(a [size, K], b)` gets the same bits, at any place of a.

    Those that agree with the largest that does not mind the place.
    """
    del threads
    (inner, columns), generator = layout.shape, torch.Generator().manual_seed(0)
    found = sizes
    for _ in range(_TRIES):
        row, matrix = _cancelling(1, columns, inner, layout.dtype, generator)
        b = _placed(matrix, layout)
        results = {size: torch.mm(row.repeat(size, 1), b) for size in found}
        steady = [size for size in found if (results[size] == results[size][:1]).all()]
        found = tuple(size for size in steady if torch.equal(results[size][0], results[steady[-1]][0]))
    return found


@cache
def items_agree(items: int, columns: int, item: Item, threads: int) -> bool:
    """Whether a batched product of so many items and columns gives every element the bits that the reference gives it.

    The reference is one item with `REFERENCE_COLUMNS` columns; at which of them must not matter either.
    """
    del threads
    for seed in range(_TRIES):
        one, many = _one_column(1, REFERENCE_COLUMNS, item, seed), _one_column(items, columns, item, seed)
        if not (one == one[:, :, :1]).all() or not (many == one[:, :, :1]).all():
            return False
    return True


def _one_column(items: int, columns: int, item: Item, seed: int) -> Tensor:
    """The same rows times the same column, over and over: [items, rows, columns]."""
    generator = torch.Generator().manual_seed(seed)
    a, column = _cancelling(item.rows, 1, item.inner, item.dtype, generator)
    b = column.expand(item.inner, columns)
    b = b.T.contiguous().T if item.turned else b.contiguous()
    return torch.bmm(a.repeat(items, 1, 1), b.expand(items, -1, -1))


def _cancelling(
    rows: int, columns: int, inner: int, dtype: torch.dtype, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """a [rows, inner] and b [inner, columns] whose exact product is zero, up to what an odd term leaves."""
    half = inner // 2
    left, right = torch.randn(rows, half, generator=generator), torch.randn(half, columns, generator=generator)
    order = torch.randperm(inner, generator=generator)
    a = torch.cat((left, left, torch.ones(rows, inner % 2)), 1)[:, order]
    b = torch.cat((right, -right, torch.zeros(inner % 2, columns)))[order]
    return a.to(dtype), b.to(dtype)


def _placed(matrix: Tensor, layout: Layout) -> Tensor:
    """The matrix where and how the layout says."""
    (inner, columns), (down, across) = layout.shape, layout.strides
    extent = (inner - 1) * down + (columns - 1) * across + 1
    size = matrix.element_size()
    space = torch.zeros(extent + 128 // size, dtype=matrix.dtype)
    start = (layout.offset - space.data_ptr()) % 64 // size
    return space[start:].as_strided((inner, columns), (down, across)).copy_(matrix)
