"""From rows to the stored bytes of compressed entries: pooling, then norm, rotation, rounding and the write in one."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.core.batch import Pairs
from deepinfer.ops.kv_formats.sizes import LATENT_BLOCK, POWER_BLOCK, index_bytes, latent_bytes
from deepinfer.ops.triton import block, e2m1_round, from_power, narrow, power_above, to_e4m3


@triton.jit
def _normed(row, norm_ptr, c, inside, eps, D: tl.constexpr):
    """Even and odd channels c, c + 1 of one row, normed, as BF16 numbers."""
    even = narrow(tl.load(row + c, mask=inside, other=0.0).to(tl.float32))
    odd = narrow(tl.load(row + c + 1, mask=inside, other=0.0).to(tl.float32))
    scale = tl.rsqrt(tl.sum(tl.sum(even * even + odd * odd, 1), 0) / D + eps)
    even = narrow(even * scale * tl.load(norm_ptr + c, mask=inside, other=0.0))
    return even, narrow(odd * scale * tl.load(norm_ptr + c + 1, mask=inside, other=0.0))


@triton.jit
def _turned(even, odd, turns, c, inside, KEPT: tl.constexpr):
    """The same with the channels from KEPT on rotated; turns: the row's cosines and sines."""
    f = tl.maximum(c - KEPT, 0)  # pairs of numbers as well as pairs of channels
    turns_here = inside & (c >= KEPT)
    cos, sin = tl.load(turns + f, mask=turns_here, other=1.0), tl.load(turns + f + 1, mask=turns_here, other=0.0)
    first, second = narrow(even * cos - odd * sin), narrow(even * sin + odd * cos)
    return tl.where(turns_here, first, even), tl.where(turns_here, second, odd)  # as they are, signs of zeros included


@triton.jit
def _largest(even, odd):
    """(largest magnitude of each block, whether it holds a NaN)."""
    nan = tl.max(((even != even) | (odd != odd)).to(tl.int32), 1) > 0
    return tl.maximum(tl.max(tl.abs(even), 1), tl.max(tl.abs(odd), 1)), nan


@triton.jit
def _e2m1(x):
    """FP32 to E2M1 codes."""
    level = tl.abs(e2m1_round(x))
    code = tl.where(level < 2.0, 2.0 * level, tl.where(level < 4.0, level + 2.0, 0.5 * level + 4.0))
    return code.to(tl.int32) | ((x.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def _latent_rows(x_ptr, norm_ptr, turns_ptr, places_ptr, latents_ptr, out_ptr, eps, D: tl.constexpr,
                 TURNED: tl.constexpr, PLACED: tl.constexpr, BLOCKS: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    b, pair = tl.arange(0, BLOCKS), tl.arange(0, 8)[None, :]
    c = b[:, None] * 16 + 2 * pair
    inside = c < D
    even, odd = _normed(x_ptr + row * D, norm_ptr, c, inside, eps, D)
    tl.store(latents_ptr + row * D + c, even.to(tl.bfloat16), mask=inside)
    tl.store(latents_ptr + row * D + c + 1, odd.to(tl.bfloat16), mask=inside)
    even, odd = _turned(even, odd, turns_ptr + row * TURNED, c, inside, D - TURNED)
    largest, nan = _largest(even, odd)
    size = tl.minimum(tl.math.div_rn(tl.maximum(largest, 0.01171875), 6.0), 448.0)  # 6 * 2^-9
    scale = to_e4m3(size)
    wide = scale.to(tl.float32)[:, None]
    codes = _e2m1(tl.math.div_rn(even, wide)) | (_e2m1(tl.math.div_rn(odd, wide)) << 4)
    to = out_ptr + (tl.load(places_ptr + row) if PLACED else row) * (D // 2 + D // 16)
    tl.store(to + b[:, None] * 8 + pair, codes.to(tl.uint8), mask=inside)
    tl.store(to + D // 2 + b, tl.where(nan, 127, scale.to(tl.uint8, bitcast=True)).to(tl.uint8), mask=b < D // 16)


@triton.jit
def _key_rows(x_ptr, norm_ptr, turns_ptr, places_ptr, out_ptr, eps, D: tl.constexpr, TURNED: tl.constexpr,
              PLACED: tl.constexpr, BLOCKS: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    b, pair = tl.arange(0, BLOCKS), tl.arange(0, 16)[None, :]
    c = b[:, None] * 32 + 2 * pair
    inside = c < D
    even, odd = _normed(x_ptr + row * D, norm_ptr, c, inside, eps, D)
    even, odd = _turned(even, odd, turns_ptr + row * TURNED, c, inside, D - TURNED)
    largest, nan = _largest(even, odd)
    power = power_above(tl.math.div_rn(tl.maximum(largest, 7.052966104933725e-38), 6.0))  # 6 * 2^-126
    inverse = from_power(254 - power)[:, None]
    codes = _e2m1(even * inverse) | (_e2m1(odd * inverse) << 4)
    to = out_ptr + (tl.load(places_ptr + row) if PLACED else row) * (D // 2 + D // 32)
    tl.store(to + b[:, None] * 16 + pair, codes.to(tl.uint8), mask=inside)
    tl.store(to + D // 2 + b, tl.where(nan, 255, power).to(tl.uint8), mask=b < D // 32)


@triton.jit
def _pool_rows(made_ptr, pending_ptr, rows_ptr, partners_ptr, slots_ptr, positions_ptr, out_ptr, count, ring,
               D: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    w = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    partner = tl.load(partners_ptr + w)
    if partner < count:
        there = made_ptr + partner * 2 * D + c
    else:
        position = tl.load(positions_ptr + partner - count)
        place = tl.load(slots_ptr + partner - count) * ring + (position + 2 * ring) // 2 % ring  # -1 where nobody reads
        there = pending_ptr + place * 2 * D + c
    here = made_ptr + tl.load(rows_ptr + w) * 2 * D + c
    first, score = tl.load(there, mask=c < D, other=0.0), tl.load(there + D, mask=c < D, other=0.0)
    second, other = tl.load(here, mask=c < D, other=0.0), tl.load(here + D, mask=c < D, other=0.0)
    top = tl.maximum(score, other)
    score, other = tl.exp(score - top), tl.exp(other - top)
    total = score + other
    tl.store(out_ptr + w * D + c, score / total * first + other / total * second, mask=c < D)


@triton.jit
def _keep_rows(made_ptr, pending_ptr, kept_ptr, slots_ptr, positions_ptr, ring, WIDTH: tl.constexpr,
               BLOCK: tl.constexpr):  # fmt: skip
    row = tl.load(kept_ptr + tl.program_id(0)).to(tl.int64)
    c = tl.arange(0, BLOCK)
    place = tl.load(slots_ptr + row) * ring + tl.load(positions_ptr + row) // 2 % ring
    values = tl.load(made_ptr + row * WIDTH + c, mask=c < WIDTH)
    tl.store(pending_ptr + place * WIDTH + c, values, mask=c < WIDTH)


def latent_rows(x: Tensor, norm: Tensor, turns: Tensor, eps: float, out: Tensor, places: Tensor | None) -> Tensor:
    """x FP32 [W, D], norm FP32 [D], turns complex64 [W, F] -> latents BF16 [W, D]; see the package."""
    rows, width = x.shape
    latents = torch.empty(rows, width, dtype=torch.bfloat16, device=x.device)
    assert out.shape[1] == latent_bytes(width)
    if rows:
        _latent_rows[(rows,)](
            x, norm, torch.view_as_real(turns), places, latents, out, eps, D=width, TURNED=2 * turns.shape[1],
            PLACED=places is not None, BLOCKS=block(width // LATENT_BLOCK),
        )  # fmt: skip
    return latents


def key_rows(x: Tensor, norm: Tensor, turns: Tensor, eps: float, out: Tensor, places: Tensor | None) -> None:
    """x BF16 [W, d], norm FP32 [d], turns complex64 [W, F]; see the package."""
    rows, width = x.shape
    assert out.shape[1] == index_bytes(width)
    if rows:
        _key_rows[(rows,)](
            x, norm, torch.view_as_real(turns), places, out, eps, D=width, TURNED=2 * turns.shape[1],
            PLACED=places is not None, BLOCKS=block(width // POWER_BLOCK),
        )  # fmt: skip


def pool_rows(made: Tensor, pending: Tensor, pairs: Pairs) -> Tensor:
    """made FP32 [N, 2, D], pending FP32 [slots, ring, 2, D] -> FP32 [W, D]; see the package."""
    rows, width = len(pairs.rows), made.shape[2]
    out = torch.empty(rows, width, device=made.device)
    if rows:
        _pool_rows[(rows,)](
            made, pending, pairs.rows, pairs.partners, pairs.pending_slots, pairs.pending_positions, out, len(made),
            pending.shape[1], D=width, BLOCK=block(width),
        )  # fmt: skip
    return out


def keep_rows(made: Tensor, pending: Tensor, kept: Tensor, slots: Tensor, positions: Tensor) -> None:
    """made FP32 [N, 2, D], pending FP32 [slots, ring, 2, D], kept, slots, positions int64; see the package."""
    width = 2 * made.shape[2]
    if len(kept):
        _keep_rows[(len(kept),)](
            made, pending, kept, slots, positions, pending.shape[1], WIDTH=width, BLOCK=block(width)
        )
