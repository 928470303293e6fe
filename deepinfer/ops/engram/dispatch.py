"""Chooses the implementation by the arguments."""

import torch
from torch import Tensor

from deepinfer.ops.engram import torch as reference
from deepinfer.ops.engram.hashing import EngramHashing
from deepinfer.ops.platform import accelerated


def remember(x: Tensor, kv: Tensor, qk: Tensor, is_text: Tensor, eps: float) -> Tensor:
    """x [N, S, H], kv [N, (S + 1) * H], qk FP32 [S, H], is_text bool [N] -> [N, S, H] in the dtype of x."""
    if accelerated(x):
        from deepinfer.ops.engram import triton

        return triton.remember(x, kv, qk, is_text, eps)
    return reference.remember(x, kv, qk, is_text, eps)


def recall(
    ids: Tensor, slots: Tensor, positions: Tensor, history: Tensor, classes: Tensor, size: int, pad: int
) -> tuple[Tensor, Tensor]:
    """ids, slots, positions int64 [N], history int64 [slots, ring], classes int64 [V] -> int64 [N, size], bool [N]."""
    if ids.is_cuda:
        from deepinfer.ops.engram import triton

        return triton.recall(ids, slots, positions, history, classes, size, pad)
    return reference.recall(ids, slots, positions, history, classes, size, pad)


def row_ids(back: Tensor, hashing: EngramHashing, heads: int) -> Tensor:
    """back int64 [N, size] -> int64 [N, (size - 1) * heads]."""
    if back.is_cuda:
        from deepinfer.ops.engram import triton

        return triton.row_ids(back, hashing, heads)
    return reference.row_ids(back, hashing, heads)


def table_rows(codes: Tensor, scales: Tensor, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """codes uint8 [T, C], scales uint8 [T, C / 32], ids int64 [A] -> [A, C] of `dtype`."""
    if codes.is_cuda and dtype is torch.bfloat16:
        from deepinfer.ops.engram import triton

        return triton.table_rows(codes, scales, ids)
    return reference.table_rows(codes, scales, ids, dtype)
