"""Rotation of whole heads: one pass that also changes the type."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rotate(x_ptr, turns_ptr, out_ptr, heads, kept, pairs, stride, HEADS: tl.constexpr, KEPT: tl.constexpr,
            PAIRS: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    width = kept + 2 * pairs
    inside = head[:, None] < heads
    source, target = x_ptr + row * stride + head[:, None] * width, out_ptr + (row * heads + head[:, None]) * width
    c = tl.arange(0, KEPT)
    plain = inside & (c < kept)[None, :]
    copied = tl.load(source + c[None, :], mask=plain, other=0.0).to(tl.float32)
    tl.store(target + c[None, :], copied.to(out_ptr.dtype.element_ty), mask=plain)
    f = tl.arange(0, PAIRS)
    turned = inside & (f < pairs)[None, :]
    even = tl.load(source + kept + 2 * f[None, :], mask=turned, other=0.0).to(tl.float32)
    odd = tl.load(source + kept + 2 * f[None, :] + 1, mask=turned, other=0.0).to(tl.float32)
    cos = tl.load(turns_ptr + (row * pairs + f) * 2, mask=f < pairs, other=0.0)[None, :]
    sin = tl.load(turns_ptr + (row * pairs + f) * 2 + 1, mask=f < pairs, other=0.0)[None, :]
    first, second = even * cos - odd * sin, even * sin + odd * cos
    tl.store(target + kept + 2 * f[None, :], first.to(out_ptr.dtype.element_ty), mask=turned)
    tl.store(target + kept + 2 * f[None, :] + 1, second.to(out_ptr.dtype.element_ty), mask=turned)


def rotate(x: Tensor, turns: Tensor, dtype: torch.dtype) -> Tensor:
    """x [N, h, C], turns complex64 [N, F] -> [N, h, C] of `dtype`, the last 2F channels of each head rotated."""
    rows, heads, width = x.shape
    pairs = turns.shape[1]
    out = torch.empty(rows, heads, width, dtype=dtype, device=x.device)
    if rows:
        each = 8 if heads % 8 == 0 else 1
        _rotate[(rows, heads // each)](
            x, torch.view_as_real(turns), out, heads, width - 2 * pairs, pairs, x.stride(0), HEADS=each,
            KEPT=triton.next_power_of_2(max(1, width - 2 * pairs)), PAIRS=triton.next_power_of_2(pairs),
        )  # fmt: skip
    return out
