"""Sinkhorn normalisation with its gradient as two Triton kernels: forty tiny steps in one launch each way."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 64


@triton.jit
def _forward(z, out, divisors, count, eps, STEPS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k = tl.arange(0, SIZE)
    at = n[:, None, None] * SIZE * SIZE + k[None, :, None] * SIZE + k[None, None, :]
    live = (n < count)[:, None, None] & (k[None, :, None] < SIZE) & (k[None, None, :] < SIZE)
    m = tl.load(z + at, mask=live, other=0.0)
    m = tl.exp(m - tl.max(m, axis=2)[:, :, None])
    m = m / tl.sum(m, axis=2)[:, :, None] + eps
    side = n[:, None] * SIZE + k[None, :]
    for step in range(STEPS):
        if step % 2 == 0:
            d = tl.sum(m, axis=1) + eps
            m = m / d[:, None, :]
        else:
            d = tl.sum(m, axis=2) + eps
            m = m / d[:, :, None]
        tl.store(divisors + step * count * SIZE + side, d, mask=(n < count)[:, None])
    tl.store(out + at, m, mask=live)


@triton.jit
def _backward(dout, out, divisors, dz, count, eps, STEPS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k = tl.arange(0, SIZE)
    at = n[:, None, None] * SIZE * SIZE + k[None, :, None] * SIZE + k[None, None, :]
    live = (n < count)[:, None, None] & (k[None, :, None] < SIZE) & (k[None, None, :] < SIZE)
    y = tl.load(out + at, mask=live, other=0.0)
    dy = tl.load(dout + at, mask=live, other=0.0)
    side = n[:, None] * SIZE + k[None, :]
    for back in range(STEPS):
        step = STEPS - 1 - back
        d = tl.load(divisors + step * count * SIZE + side, mask=(n < count)[:, None], other=1.0)
        if step % 2 == 0:  # y = m / d and d = sum(m) + eps, so dm = (dy - sum(dy * y)) / d and m = y * d
            dy = (dy - tl.sum(dy * y, axis=1)[:, None, :]) / d[:, None, :]
            y = y * d[:, None, :]
        else:
            dy = (dy - tl.sum(dy * y, axis=2)[:, :, None]) / d[:, :, None]
            y = y * d[:, :, None]
    soft = y - eps
    tl.store(dz + at, soft * (dy - tl.sum(dy * soft, axis=2)[:, :, None]), mask=live)


class Sinkhorn(torch.autograd.Function):
    """`hyper.sinkhorn` of FP32 [N, S, S], S a power of two."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, iterations: int, eps: float) -> Tensor:
        """[N, S, S] -> [N, S, S]."""
        scores = scores.contiguous()
        count, size, _ = scores.shape
        steps = 2 * iterations - 1
        out = torch.empty_like(scores)
        divisors = scores.new_empty(steps, count, size)
        grid = (triton.cdiv(count, _BLOCK),)
        _forward[grid](scores, out, divisors, count, eps, steps, size, _BLOCK)
        ctx.save_for_backward(out, divisors)
        ctx.eps = eps
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Runs the steps backwards, restoring each step's input from its output and divisors."""
        out, divisors = ctx.saved_tensors
        count, size, _ = out.shape
        dz = torch.empty_like(out)
        grid = (triton.cdiv(count, _BLOCK),)
        _backward[grid](grads[0].contiguous(), out, divisors, dz, count, ctx.eps, len(divisors), size, _BLOCK)
        return dz, None, None
