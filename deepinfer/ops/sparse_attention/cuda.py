"""Attention of rows over stored entries and windows on Hopper: 64 heads of 512 channels, 512 entries, 128 keys."""

import ctypes

import torch
from torch import Tensor

from deepinfer.ops import cuda
from deepinfer.ops.cuda import check, pointer, stream

HEADS, CHANNELS, CHOSEN, WINDOW = 64, 512, 512, 128
_MULTIPROCESSORS = 132
_SPLITS = (10, 5, 2, 1)


class _Shape(ctypes.Structure):
    """`Args` of csrc/sparse_attention.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("fp4", "fp8", "select", "window", "sink", "out", "part", "lse")),
        *((name, ctypes.c_int) for name in ("rows", "splits")),
    )


def attend_rows(
    q: Tensor, windows: Tensor, near: Tensor, latents: Tensor | None, chosen: Tensor | None, sink: Tensor
) -> Tensor:
    """As `torch.attend_rows`, for q FP16 [M, 64, 512]; near int32 [M, 128], chosen int32 [M, 512] -> BF16."""
    rows = len(q)
    out = torch.empty(rows, HEADS, CHANNELS, dtype=torch.bfloat16, device=q.device)
    if not rows:
        return out
    possible = _SPLITS if latents is not None else _SPLITS[2:]
    splits = next((s for s in possible if rows * s <= _MULTIPROCESSORS), 1)
    parts, sums = None, None
    if splits > 1:
        parts = torch.empty(rows, splits, HEADS, CHANNELS, dtype=torch.float16, device=q.device)
        sums = torch.empty(rows, splits, HEADS, device=q.device)
    tensors = (latents, windows, chosen, near, sink, out, parts, sums)
    shape = _Shape(*map(pointer, tensors), rows, splits)
    library = cuda.library("sparse_attention")
    check(library.launch_attention(pointer(q), shape, int(latents is not None), stream()), "attention")
    return out
