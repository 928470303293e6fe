"""Index scores on Hopper, and the 512 best of each row's."""

import ctypes
import math

import torch
from torch import Tensor

from deepinfer.ops import cuda
from deepinfer.ops.cuda import check, pointer, stream
from deepinfer.ops.rows.index import Index

COUNT = 512
HEADS = 32
ROWS = 8
"""Most rows of one request that share a pass over its keys."""
_TILE, _LEAST = 64, 4  # keys of a tile; that lie together at least, for copies of whole 16 bytes
_AT_ONCE = 528  # blocks of the device
_LONG, _FEW = 32768, 16  # scores of a row, rows: then several blocks share a row


class _Shape(ctypes.Structure):
    """`Args` of csrc/index_scores.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("keys", "table", "slots", "firsts", "counts")),
        *((name, ctypes.c_void_p) for name in ("visible", "blocks", "weights", "out")),
        *((name, ctypes.c_int64) for name in ("table_stride", "out_stride")),
        *((name, ctypes.c_int) for name in ("columns", "tiles_each", "unit", "entries")),
    )


def _together(index: Index) -> int:
    """Entries that lie together and fit whole into a tile."""
    return math.gcd(_TILE, index.entries if index.blocks is None else math.gcd(index.entries, index.block))


def fits(index: Index) -> bool:
    """Whether the kernel can fetch these entries."""
    together = _together(index)
    return together >= _LEAST and (index.blocks is None or together == index.block)


def scores(codes: Tensor, weights: Tensor, index: Index) -> Tensor:
    """Scores FP32 [M, length] of `triton.queries` against entries.

    What lies at or beyond a row's `visible` is undefined. With blocks, column i is entry i % block of the row's block
    i // block, -inf where it may not be chosen.
    """
    rows, groups = len(codes), len(index.group_slots)
    out = torch.empty(rows, index.length, device=codes.device)
    if not groups or not index.length:
        return out
    shared = 1 if groups == rows else ROWS
    tiles = -(-index.length // _TILE)
    each = min(max(-(-tiles * groups // _AT_ONCE), 2), 32 if shared == 1 else 64)
    tensors = index.keys, index.page_table, index.group_slots, index.group_firsts, index.group_counts, index.visible
    shape = _Shape(
        *map(pointer, (*tensors, index.blocks, weights, out)),
        *(index.page_table.stride(0), out.stride(0), index.length, each, _together(index), index.entries),
    )
    error = cuda.library("index_scores").launch_scores(shared, pointer(codes), rows, groups, shape, stream())
    check(error, "index scores")
    return out


class _Entries(ctypes.Structure):
    """`Entries` of csrc/select.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("table", "slots", "blocks")),
        ("stride", ctypes.c_int64),
        *((name, ctypes.c_int) for name in ("entries", "listed", "block")),
    )


def best_entries(scores: Tensor, index: Index) -> Tensor:
    """scores FP32 [M, length] of an index -> int32 [M, 512]: addresses of the best entries, as in `best_of_rows`."""
    blocks, table = index.blocks, index.page_table
    listed = 0 if blocks is None else blocks.shape[1]
    pointers = pointer(table), pointer(index.slots), pointer(blocks)
    places = _Entries(*pointers, table.stride(0), index.entries, listed, index.block)
    return _best(scores, index.visible if blocks is None else None, places)


def best_of_rows(scores: Tensor, visible: Tensor) -> Tensor:
    """scores FP32 [M, S], visible int32 [M] -> int32 [M, 512]: positions below `visible`, -1 where there are fewer.

    In no order, but in the same each time; of equal scores the lower position is kept, whatever else is in the batch.
    """
    return _best(scores, visible, _Entries())


def _best(scores: Tensor, visible: Tensor | None, places: _Entries) -> Tensor:
    rows, width = scores.shape
    out = torch.empty(rows, COUNT, dtype=torch.int32, device=scores.device)
    if not rows:
        return out
    splits = 8 if width >= _LONG and rows <= _FEW and visible is not None else 1
    positions, values = None, None
    if splits > 1:
        positions = torch.empty(rows, splits, COUNT, dtype=torch.int32, device=scores.device)
        values = torch.empty(rows, splits, COUNT, device=scores.device)
    arguments = (pointer(scores), ctypes.c_int64(scores.stride(0)), pointer(visible), rows, splits, width)
    error = cuda.library("select").launch_select(*arguments, *map(pointer, (positions, values, out)), places, stream())
    check(error, "the choice of the best")
    return out
