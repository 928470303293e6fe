"""Products of matrices whose rows do not depend on how many there are.

A library chooses its kernel by the shape, and kernels differ in the order of their sums. On a CPU a product is
therefore computed in pieces of few shapes, of which `agreement` has found that they give a row the same bits; on a GPU
a kernel of our own has one tile shape and one order.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from deepinfer.ops.invariance.agreement import REFERENCE_COLUMNS, Item, Layout, agreeing_rows, items_agree, layout_of
from deepinfer.ops.invariance.sums import row_sums

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
ITEMS = (1, 4, 16, 64, 256)
COLUMNS = tuple(REFERENCE_COLUMNS << place for place in range(5))
"""Sizes of pieces: rows of a product with one matrix; items, and columns of each, of a batched product."""

Pieces = tuple[tuple[int, int], ...]
"""(what is used of a piece, its size), one piece after another."""


def product(a: Tensor, b: Tensor) -> Tensor:
    """a [..., K] and one matrix b [K, N] -> [..., N], or a [B, M, K] and b [B, K, N] -> [B, M, N]; dtype of both."""
    if a.is_cuda:
        from deepinfer.ops.invariance import triton

        return triton.product(a, b)
    if b.dim() == 2:
        if a.dim() == 2:
            return _by_rows(a.contiguous(), b)
        return _by_rows(a.reshape(-1, a.shape[-1]), b).view(*a.shape[:-1], b.shape[1])
    return _by_items(a.contiguous(), b)


def _by_rows(a: Tensor, b: Tensor) -> Tensor:
    pieces = _row_pieces(a.shape[0], layout_of(b), torch.get_num_threads())
    if len(pieces) == 1:
        return torch.mm(_piece(a, pieces[0][1]), b)[: a.shape[0]]
    out, begin = a.new_empty(a.shape[0], b.shape[1]), 0
    for used, size in pieces:
        part, place = a[begin : begin + used], out[begin : begin + used]
        if used == size and _aligned(place):
            torch.mm(_piece(part, size), b, out=place)
        else:
            place.copy_(torch.mm(_piece(part, size), b)[:used])
        begin += used
    return out


def _piece(a: Tensor, rows: int) -> Tensor:
    """a [M, K] as the rows of a piece, contiguous; what further rows hold does not matter."""
    if a.shape[0] < rows:
        return a.expand(rows, -1).contiguous() if a.shape[0] == 1 else functional.pad(a, (0, 0, 0, rows - a.shape[0]))
    return a if _aligned(a) else a.clone()


def _aligned(x: Tensor) -> bool:
    """Whether x begins where a new tensor would: a kernel may treat what lies before such a place differently."""
    return x.data_ptr() % 64 == 0


def _by_items(a: Tensor, b: Tensor) -> Tensor:
    item = Item(a.shape[1], a.shape[2], b.stride(1) == 1 and b.stride(2) != 1, a.dtype)
    columns = _column_pieces(b.shape[2], item, torch.get_num_threads())
    if not columns:
        return _unfused(a, b)
    made, begin = [], 0
    for used, size in columns:
        part = b[:, :, begin : begin + used]
        made.append(_items(a, part if used == size else _widened(part, size, item.turned), item)[:, :, :used])
        begin += used
    return made[0] if len(made) == 1 else torch.cat(made, 2)


def _items(a: Tensor, b: Tensor, item: Item) -> Tensor:
    """The product where the columns are those of one piece."""
    pieces = _item_pieces(a.shape[0], b.shape[2], item, torch.get_num_threads())
    if len(pieces) == 1:
        return torch.bmm(a if _aligned(a) else a.clone(), b)
    out, begin = a.new_empty(a.shape[0], a.shape[1], b.shape[2]), 0
    for size, _ in pieces:
        part, place = a[begin : begin + size], out[begin : begin + size]
        part = part if _aligned(part) else part.clone()
        if _aligned(place):
            torch.bmm(part, b[begin : begin + size], out=place)
        else:
            place.copy_(torch.bmm(part, b[begin : begin + size]))
        begin += size
    return out


def _widened(b: Tensor, columns: int, turned: bool) -> Tensor:
    """b [B, K, N] with columns of zeros added, in the same layout."""
    short = columns - b.shape[2]
    if turned:
        return functional.pad(b.transpose(1, 2), (0, 0, 0, short)).transpose(1, 2)
    return functional.pad(b, (0, short))


def _unfused(a: Tensor, b: Tensor) -> Tensor:
    """What is left where no shape of a library's product can be relied on."""
    wide, columns = a.float(), b.float().transpose(1, 2)
    made = [row_sums(wide * columns[:, None, column])[..., 0] for column in range(columns.shape[1])]
    return torch.stack(made, -1).to(a.dtype)


@lru_cache(maxsize=1 << 16)
def _row_pieces(rows: int, layout: Layout, threads: int) -> Pieces:
    return _pieces(rows, agreeing_rows(ROWS, layout, threads) or (1,))  # a row by itself depends on nothing


@lru_cache(maxsize=1 << 16)
def _column_pieces(columns: int, item: Item, threads: int) -> Pieces:
    return _pieces(columns, [size for size in COLUMNS if items_agree(1, size, item, threads)])


@lru_cache(maxsize=1 << 16)
def _item_pieces(items: int, columns: int, item: Item, threads: int) -> Pieces:
    return _pieces(items, [size for size in ITEMS if items_agree(size, columns, item, threads)], waste=0)


def _pieces(count: int, sizes: Sequence[int], waste: float = 1 / 3) -> Pieces:
    """Cut `count` into pieces of the ascending `sizes`, the last used in part; nothing if there are no sizes.

    Rather than into several, the rest goes into one that exceeds it by at most `waste`.
    """
    pieces: list[tuple[int, int]] = []
    left = count if sizes else 0
    while left:
        larger = [size for size in sizes if left <= size <= left * (1 + waste)]
        size = larger[0] if larger else max((size for size in sizes if size <= left), default=sizes[0])
        pieces.append((min(size, left), size))
        left -= min(size, left)
    return tuple(pieces)
