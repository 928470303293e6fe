"""The 512 best of each row's scores on Hopper."""

import ctypes

import torch
from torch import Tensor

from deepinfer.ops import cuda
from deepinfer.ops.cuda import check, pointer, stream

COUNT = 512
_LONG, _FEW = 32768, 16  # scores of a row, rows: then several blocks share a row


def best_of_rows(scores: Tensor, visible: Tensor) -> Tensor:
    """scores FP32 [M, S], visible int32 [M] -> int32 [M, 512]: positions below `visible`, -1 where there are fewer.

    In an order that is the same each time; of equal scores the lower position is kept, whatever else is in the batch.
    """
    rows, width = scores.shape
    out = torch.empty(rows, COUNT, dtype=torch.int32, device=scores.device)
    if not rows:
        return out
    splits = 8 if width >= _LONG and rows <= _FEW else 1
    positions, values = None, None
    if splits > 1:
        positions = torch.empty(rows, splits, COUNT, dtype=torch.int32, device=scores.device)
        values = torch.empty(rows, splits, COUNT, device=scores.device)
    arguments = (pointer(scores), ctypes.c_int64(scores.stride(0)), pointer(visible), rows, splits, width)
    error = cuda.library("select").launch_select(*arguments, *map(pointer, (positions, values, out)), stream())
    check(error, "the choice of the best")
    return out
