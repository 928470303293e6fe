"""A site's edge in three kernels: streams and next input in one pass, statistics as a split product, Sinkhorn."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.ops.hyper_connections.torch import Mix
from deepinfer.ops.triton import block, dot, narrow

_COEFFICIENTS = 32  # rows of the projection, padded
_DEPTH = 128  # columns of a step of the statistics


@triton.jit
def _advance(y_ptr, x_ptr, post_ptr, comb_ptr, pre_ptr, norm_ptr, out_ptr, input_ptr, columns, eps, S: tl.constexpr,
             BLOCK: tl.constexpr):  # fmt: skip
    """New streams `post[s] * y + sum_r comb[r, s] * x[r]`, and the normed `sum_s pre[s] * (new stream s)`."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    inside = c < columns
    y = tl.load(y_ptr + row * columns + c, mask=inside, other=0.0).to(tl.float32)
    collapsed = tl.zeros((BLOCK,), tl.float32)
    for s in tl.static_range(S):
        made = y * tl.load(post_ptr + row * S + s)
        for r in tl.static_range(S):
            old = tl.load(x_ptr + (row * S + r) * columns + c, mask=inside, other=0.0).to(tl.float32)
            made += tl.load(comb_ptr + (row * S + r) * S + s) * old
        kept = narrow(made)
        tl.store(out_ptr + (row * S + s) * columns + c, kept.to(tl.bfloat16), mask=inside)
        collapsed += tl.load(pre_ptr + row * S + s) * kept
    collapsed = narrow(collapsed)
    scale = tl.rsqrt(tl.sum(collapsed * collapsed, 0) / columns + eps)
    made = collapsed * scale * tl.load(norm_ptr + c, mask=inside, other=0.0)
    tl.store(input_ptr + row * columns + c, narrow(made).to(tl.bfloat16), mask=inside)


def advance(y: Tensor, x: Tensor, mix: Mix, norm: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """y [N, H], x [N, S, H], the site's mix, the next site's norm FP32 [H] -> (new streams, next normed input)."""
    rows, streams, columns = x.shape
    out, made = torch.empty(x.shape, dtype=x.dtype, device=x.device), torch.empty_like(y)
    if rows:
        _advance[(rows,)](
            y, x, *(part.contiguous() for part in (mix.post, mix.comb, mix.pre)), norm, out, made, columns, eps,
            S=streams, BLOCK=block(columns),
            num_warps=8,
        )  # fmt: skip
    return out, made


@triton.jit(do_not_specialize=["rows"])
def _project(x_ptr, fn_ptr, parts_ptr, rows, columns, count, PART: tl.constexpr, ROWS: tl.constexpr,
             COUNT: tl.constexpr, DEPTH: tl.constexpr):  # fmt: skip
    """One part of K: sums of x * fn, and of x * x in the last column. fn goes in as three BF16 parts: exact to FP32."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    part = tl.program_id(1)
    e = tl.arange(0, COUNT)
    k = part * PART + tl.arange(0, DEPTH)
    acc = tl.zeros((ROWS, COUNT), tl.float32)
    squares = tl.zeros((ROWS,), tl.float32)
    for step in tl.range(0, PART, DEPTH):
        at = k + step
        inside = at < columns
        x = tl.load(
            x_ptr + row[:, None] * columns + at[None, :], mask=(row < rows)[:, None] & inside[None, :], other=0.0
        )
        fn = tl.load(
            fn_ptr + e[:, None] * columns + at[None, :], mask=(e < count)[:, None] & inside[None, :], other=0.0
        )
        high = fn.to(tl.bfloat16)
        rest = fn - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        acc = dot(x, tl.trans(high), acc)
        acc = dot(x, tl.trans(middle), acc)
        acc = dot(x, tl.trans(low), acc)
        wide = x.to(tl.float32)
        squares += tl.sum(wide * wide, 1)
    to = parts_ptr + (part * rows + row[:, None]) * COUNT + e[None, :]
    tl.store(to, tl.where((e == COUNT - 1)[None, :], squares[:, None], acc), mask=(row < rows)[:, None])


@triton.jit(do_not_specialize=["rows", "parts"])
def _finish(parts_ptr, base_ptr, scale_ptr, pre_ptr, post_ptr, comb_ptr, rows, parts, columns, norm_eps, hc_eps,
            ITERATIONS: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    """One row: its 24 coefficients as lines of four are pre, post and the four lines of comb."""
    row = tl.program_id(0).to(tl.int64)
    p, e = tl.arange(0, PARTS), tl.arange(0, 32)
    at = parts_ptr + (p[:, None] * rows + row) * 32 + e[None, :]
    z = tl.sum(tl.load(at, mask=(p < parts)[:, None], other=0.0), 0)
    norm = tl.rsqrt(tl.sum(tl.where(e == 31, z, 0.0), 0) / columns + norm_eps)
    z = tl.load(base_ptr + e, mask=e < 24, other=0.0) + z * norm * tl.load(scale_ptr + e, mask=e < 24, other=0.0)
    mixed = tl.sigmoid(z)
    tl.store(pre_ptr + row * 4 + e, mixed + hc_eps, mask=e < 4)
    tl.store(post_ptr + row * 4 + e - 4, 2.0 * mixed, mask=(e >= 4) & (e < 8))
    lines = tl.reshape(z, (8, 4))
    line, column = tl.arange(0, 8)[:, None], tl.arange(0, 4)[None, :]
    inside = (line >= 2) & (line < 6) & (column >= 0)
    comb = tl.exp(lines - tl.max(lines, 1)[:, None])
    comb = tl.where(inside, comb / tl.sum(comb, 1)[:, None] + hc_eps, 0.0)
    comb = comb / (tl.sum(comb, 0) + hc_eps)[None, :]
    for _ in range(ITERATIONS - 1):
        comb = comb / (tl.sum(comb, 1) + hc_eps)[:, None]
        comb = comb / (tl.sum(comb, 0) + hc_eps)[None, :]
    tl.store(comb_ptr + row * 16 + (line - 2) * 4 + column, comb, mask=inside)


def coefficients(
    x: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm_eps: float, hc_eps: float, iterations: int
) -> Mix:
    """As `torch.coefficients`; x BF16 [N, 4, H]: of four streams."""
    rows, streams = x.shape[:2]
    columns, count = fn.shape[1], fn.shape[0]
    assert streams == 4
    pre, post = (torch.empty(rows, streams, device=x.device) for _ in range(2))
    comb = torch.empty(rows, streams, streams, device=x.device)
    if rows:
        tall = 16 if rows <= 16 else 64
        blocks = triton.cdiv(rows, tall)
        split = max(1, min(triton.cdiv(columns, 4 * _DEPTH), 528 // blocks))
        part = triton.cdiv(triton.cdiv(columns, split), _DEPTH) * _DEPTH
        split = triton.cdiv(columns, part)
        parts = torch.empty(split, rows, _COEFFICIENTS, device=x.device)
        _project[(blocks, split)](
            x, fn, parts, rows, columns, count, PART=part, ROWS=tall, COUNT=_COEFFICIENTS, DEPTH=_DEPTH, num_warps=4,
            num_stages=2,
        )  # fmt: skip
        _finish[(rows,)](
            parts, base, scale, pre, post, comb, rows, split, columns, norm_eps, hc_eps, ITERATIONS=iterations,
            PARTS=block(split), num_warps=1,
        )  # fmt: skip
    return Mix(pre, post, comb)
