"""Engram's hashes, its rows read from a table, and the gated sum of streams and memory."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.ops.engram.hashing import EngramHashing
from deepinfer.ops.triton import block, from_power, narrow


@triton.jit
def _recall(ids_ptr, slots_ptr, positions_ptr, history_ptr, classes_ptr, back_ptr, is_text_ptr, ring, pad,
            SIZE: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot, position = tl.load(slots_ptr + row), tl.load(positions_ptr + row)
    found = tl.load(classes_ptr + tl.load(ids_ptr + row))
    tl.store(is_text_ptr + row, found >= 0)
    alive = found >= 0
    tl.store(back_ptr + row * SIZE, tl.where(alive, found, pad))
    for distance in tl.static_range(1, SIZE):
        there = position >= distance
        earlier = tl.where(there, position - distance, 0)
        found = tl.load(classes_ptr + tl.load(history_ptr + slot * ring + earlier % ring))
        alive = alive & there & (found >= 0)
        tl.store(back_ptr + row * SIZE + distance, tl.where(alive, found, pad))


@triton.jit
def _keep(ids_ptr, slots_ptr, positions_ptr, history_ptr, ring):
    row = tl.program_id(0)
    place = tl.load(slots_ptr + row) * ring + tl.load(positions_ptr + row) % ring
    tl.store(history_ptr + place, tl.load(ids_ptr + row))


def recall(
    ids: Tensor, slots: Tensor, positions: Tensor, history: Tensor, classes: Tensor, size: int, pad: int
) -> tuple[Tensor, Tensor]:
    """ids, slots, positions int64 [N], history int64 [slots, ring], classes int64 [V] -> int64 [N, size], bool [N]."""
    rows, ring = len(ids), history.shape[1]
    back = torch.empty(rows, size, dtype=torch.int64, device=ids.device)
    is_text = torch.empty(rows, dtype=torch.bool, device=ids.device)
    if rows:
        _recall[(rows,)](
            ids, slots, positions, history, classes, back, is_text, ring, pad, SIZE=size, num_warps=1
        )  # fmt: skip
        _keep[(rows,)](ids, slots, positions, history, ring, num_warps=1)  # after all have read: rows may be equal
    return back, is_text


@triton.jit
def _row_ids(back_ptr, multipliers_ptr, primes_ptr, offsets_ptr, out_ptr, heads, SIZE: tl.constexpr,
             COUNT: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mixed = tl.zeros((BLOCK,), tl.int64)
    for back in tl.static_range(SIZE):
        term = tl.load(back_ptr + row * SIZE + back) * tl.load(multipliers_ptr + back)
        mixed = tl.where(back <= column // heads + 1, mixed ^ term, mixed)
    prime = tl.load(primes_ptr + column, mask=column < COUNT, other=1)
    rest = mixed % prime
    rest = tl.where(rest < 0, rest + prime, rest) + tl.load(offsets_ptr + column, mask=column < COUNT, other=0)
    tl.store(out_ptr + row * COUNT + column, rest, mask=column < COUNT)


def row_ids(back: Tensor, hashing: EngramHashing, heads: int) -> Tensor:
    """back int64 [N, size] -> int64 [N, (size - 1) * heads]."""
    rows, size = back.shape
    count = (size - 1) * heads
    out = torch.empty(rows, count, dtype=torch.int64, device=back.device)
    if rows:
        _row_ids[(rows,)](
            back.contiguous(), hashing.multipliers, hashing.primes, hashing.offsets, out, heads, SIZE=size, COUNT=count,
            BLOCK=block(count), num_warps=1,
        )  # fmt: skip
    return out


@triton.jit
def _table_rows(codes_ptr, scales_ptr, ids_ptr, out_ptr, C: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    source = tl.load(ids_ptr + row)
    c = tl.arange(0, BLOCK)
    code = tl.load(codes_ptr + source * C + c, mask=c < C, other=0).to(tl.float8e4nv, bitcast=True)
    power = tl.load(scales_ptr + source * (C // 32) + c // 32, mask=c < C, other=127).to(tl.int32)
    made = code.to(tl.float32) * from_power(power)
    tl.store(out_ptr + row * C + c, narrow(made).to(tl.bfloat16), mask=c < C)


def table_rows(codes: Tensor, scales: Tensor, ids: Tensor) -> Tensor:
    """codes uint8 [T, C], scales uint8 [T, C / 32], ids int64 [A] -> BF16 [A, C]."""
    rows, width = len(ids), codes.shape[1]
    out = torch.empty(rows, width, dtype=torch.bfloat16, device=ids.device)
    if rows:
        _table_rows[(rows,)](codes, scales, ids, out, C=width, BLOCK=block(width), num_warps=1)
    return out


@triton.jit
def _remember(x_ptr, kv_ptr, qk_ptr, is_text_ptr, out_ptr, eps, root, S: tl.constexpr, H: tl.constexpr,
              BLOCK: tl.constexpr):  # fmt: skip
    row, s = tl.program_id(0).to(tl.int64), tl.program_id(1)
    c = tl.arange(0, BLOCK)
    inside = c < H
    x = tl.load(x_ptr + (row * S + s) * H + c, mask=inside, other=0.0).to(tl.float32)
    key = tl.load(kv_ptr + (row * (S + 1) + s) * H + c, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(kv_ptr + (row * (S + 1) + S) * H + c, mask=inside, other=0.0).to(tl.float32)
    qk = tl.load(qk_ptr + s * H + c, mask=inside, other=0.0)
    norms = tl.rsqrt(tl.sum(x * x, 0) / H + eps) * tl.rsqrt(tl.sum(key * key, 0) / H + eps)
    agreement = tl.sum(x * qk * key, 0) * norms * root
    size = tl.sqrt(tl.maximum(tl.abs(agreement), 1e-6))
    signed = tl.where(agreement > 0.0, size, tl.where(agreement < 0.0, -size, 0.0))
    gate = tl.load(is_text_ptr + row).to(tl.float32) / (1.0 + tl.exp(-signed))
    tl.store(out_ptr + (row * S + s) * H + c, narrow(x + gate * value).to(tl.bfloat16), mask=inside)


def remember(x: Tensor, kv: Tensor, qk: Tensor, is_text: Tensor, eps: float) -> Tensor:
    """x BF16 [N, S, H], kv BF16 [N, (S + 1) * H], qk FP32 [S, H], is_text bool [N] -> BF16 [N, S, H]."""
    rows, streams, width = x.shape
    out = torch.empty(rows, streams, width, dtype=x.dtype, device=x.device)
    if rows:
        _remember[(rows, streams)](
            x.contiguous(), kv.contiguous(), qk, is_text, out, eps, width**-0.5, S=streams, H=width, BLOCK=block(width),
            num_warps=8 if width > 2048 else 4,
        )  # fmt: skip
    return out
