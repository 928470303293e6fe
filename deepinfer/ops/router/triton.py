"""The router in two kernels: a product split over its depth; then scores, choice and weights, one program a row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.ops.linear import wide_linear
from deepinfer.ops.triton import block, dot

MOST_SPLIT = 256
"""Rows; the product of more fills the device in one piece."""
_DEPTH = 128  # columns of a step of the product
_PROGRAMS = 264  # of the product, about


@triton.jit(do_not_specialize=["rows", "parts"])
def _choose(logits_ptr, bias_ptr, chosen_ptr, weights_ptr, rows, parts, experts, bias_stride, scaling,
            COUNT: tl.constexpr, SLOTS: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Logits are the sums of the parts [parts, rows, experts]."""
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK)
    inside = e < experts
    p = tl.arange(0, PARTS)
    at = logits_ptr + (p[:, None] * rows + row) * experts + e[None, :]
    x = tl.sum(tl.load(at, mask=(p < parts)[:, None] & inside[None, :], other=0.0), 0)
    softplus = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))
    scores = tl.sqrt(softplus)
    ranked = tl.where(inside, scores + tl.load(bias_ptr + row * bias_stride + e, mask=inside, other=0.0), -float("inf"))
    slot = tl.arange(0, SLOTS)
    best = tl.zeros((SLOTS,), tl.int64)
    weights = tl.zeros((SLOTS,), tl.float32)
    for k in tl.static_range(COUNT):
        place = tl.argmax(ranked, 0)
        best = tl.where(slot == k, place.to(tl.int64), best)
        weights = tl.where(slot == k, tl.sum(tl.where(e == place, scores, 0.0), 0), weights)
        ranked = tl.where(e == place, -float("inf"), ranked)
    weights = weights / (tl.sum(weights, 0) + 1e-20) * scaling
    tl.store(chosen_ptr + row * COUNT + slot, best, mask=slot < COUNT)
    tl.store(weights_ptr + row * COUNT + slot, weights, mask=slot < COUNT)


def choose(logits: Tensor, bias: Tensor, count: int, scaling: float) -> tuple[Tensor, Tensor]:
    """Parts of logits FP32 [P, N, E], bias FP32 [E] or [N, E] -> (int64 [N, count], FP32 [N, count]).

    Of equal experts the lower number.
    """
    parts, rows, experts = logits.shape
    chosen = torch.empty(rows, count, dtype=torch.int64, device=logits.device)
    weights = torch.empty(rows, count, device=logits.device)
    if rows:
        stride = bias.stride(0) if bias.ndim == 2 else 0
        _choose[(rows,)](
            logits, bias, chosen, weights, rows, parts, experts, stride, scaling, COUNT=count, SLOTS=block(count),
            PARTS=block(parts), BLOCK=block(experts),
        )  # fmt: skip
    return chosen, weights


@triton.jit(do_not_specialize=["rows"])
def _product(h_ptr, weight_ptr, parts_ptr, rows, columns, experts, PART: tl.constexpr, ROWS: tl.constexpr,
             COUNT: tl.constexpr, DEPTH: tl.constexpr):  # fmt: skip
    """One part of K of some rows and experts."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    e = tl.program_id(1) * COUNT + tl.arange(0, COUNT)
    part = tl.program_id(2)
    acc = tl.zeros((ROWS, COUNT), tl.float32)
    for step in tl.range(0, PART, DEPTH):
        at = part * PART + step + tl.arange(0, DEPTH)
        inside = (at < columns)[None, :]
        h = tl.load(h_ptr + row[:, None] * columns + at[None, :], mask=(row < rows)[:, None] & inside, other=0.0)
        w = tl.load(weight_ptr + e[:, None] * columns + at[None, :], mask=(e < experts)[:, None] & inside, other=0.0)
        acc = dot(h, tl.trans(w), acc)
    to = parts_ptr + (part * rows + row[:, None]) * experts + e[None, :]
    tl.store(to, acc, mask=(row < rows)[:, None] & (e < experts)[None, :])


def logits(h: Tensor, weight: Tensor) -> Tensor:
    """h BF16 [N, H], weight [E, H] -> FP32 [P, N, E]: parts whose sum are the logits."""
    rows, columns = h.shape
    experts = len(weight)
    if weight.dtype is not torch.bfloat16 or not 0 < rows <= MOST_SPLIT:
        return wide_linear(h, weight)[None]
    tall, wide = (16 if rows <= 16 else 64), 16
    grid = triton.cdiv(rows, tall), triton.cdiv(experts, wide)
    split = max(1, min(triton.cdiv(columns, 2 * _DEPTH), _PROGRAMS // (grid[0] * grid[1])))
    part = triton.cdiv(triton.cdiv(columns, split), _DEPTH) * _DEPTH
    split = triton.cdiv(columns, part)
    parts = torch.empty(split, rows, experts, device=h.device)
    _product[(*grid, split)](
        h, weight, parts, rows, columns, experts, PART=part, ROWS=tall, COUNT=wide, DEPTH=_DEPTH, num_warps=4,
        num_stages=3,
    )  # fmt: skip
    return parts
