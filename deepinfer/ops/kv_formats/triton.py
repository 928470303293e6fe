"""Window keys from the projection's output to their stored bytes in one pass: norm, rotation, rounding, ring."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.ops.kv_formats.sizes import window_bytes
from deepinfer.ops.triton import block, from_power, narrow, power_above, to_e4m3


@triton.jit
def _pack(blocks, BLOCKS: tl.constexpr):
    """FP32 [BLOCKS, n] -> (E4M3 bytes [BLOCKS, n] before interleaving, exponents) of blocks of which this is all."""
    power = power_above(tl.maximum(tl.max(tl.abs(blocks), 1), 1e-4) / 448.0)
    return to_e4m3(blocks / from_power(power)[:, None]).to(tl.uint8, bitcast=True), power


@triton.jit
def _store(row, codes, power, first, second, turned_power, D: tl.constexpr, KEPT: tl.constexpr, PLAIN: tl.constexpr):
    """Write one row's bytes: blocks that are not rotated, even and odd channels of those that are, exponents."""
    b, t = tl.arange(0, PLAIN), tl.arange(0, (D - KEPT) // 32)
    c = b[:, None] * 32 + tl.arange(0, 32)[None, :]
    even = KEPT + t[:, None] * 32 + 2 * tl.arange(0, 16)[None, :]
    tl.store(row + c, codes, mask=c < KEPT)
    tl.store(row + D + b, power.to(tl.uint8), mask=b < KEPT // 32)
    tl.store(row + even, first)
    tl.store(row + even + 1, second)
    tl.store(row + D + KEPT // 32 + t, turned_power.to(tl.uint8))


@triton.jit
def _window_rows(x_ptr, norm_ptr, turns_ptr, places_ptr, packed_ptr, ring_ptr, stride, eps, D: tl.constexpr,
                 TURNED: tl.constexpr, BLOCK: tl.constexpr, PLAIN: tl.constexpr):  # fmt: skip
    """Rows are D channels, the last TURNED of them rotated; PLAIN is the power of two that holds the other blocks."""
    KEPT: tl.constexpr = D - TURNED
    ROW: tl.constexpr = D + D // 32
    PAIRS: tl.constexpr = TURNED // 2
    row = tl.program_id(0).to(tl.int64)
    all_c = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride + all_c, mask=all_c < D, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / D + eps)

    b = tl.arange(0, PLAIN)
    c = b[:, None] * 32 + tl.arange(0, 32)[None, :]
    inside = c < KEPT
    plain = tl.load(x_ptr + row * stride + c, mask=inside, other=0.0).to(tl.float32) * scale
    plain = narrow(plain * tl.load(norm_ptr + c, mask=inside, other=0.0))
    codes, power = _pack(plain, PLAIN)

    t = tl.arange(0, TURNED // 32)
    f = t[:, None] * 16 + tl.arange(0, 16)[None, :]
    even_c = KEPT + 2 * f
    even = tl.load(x_ptr + row * stride + even_c).to(tl.float32) * scale * tl.load(norm_ptr + even_c)
    odd = tl.load(x_ptr + row * stride + even_c + 1).to(tl.float32) * scale * tl.load(norm_ptr + even_c + 1)
    even, odd = narrow(even), narrow(odd)
    cos, sin = tl.load(turns_ptr + (row * PAIRS + f) * 2), tl.load(turns_ptr + (row * PAIRS + f) * 2 + 1)
    first = narrow(even * cos - odd * sin)
    second = narrow(even * sin + odd * cos)
    largest = tl.maximum(tl.max(tl.abs(first), 1), tl.max(tl.abs(second), 1))
    turned_power = power_above(tl.maximum(largest, 1e-4) / 448.0)
    size = from_power(turned_power)[:, None]
    first_codes = to_e4m3(first / size).to(tl.uint8, bitcast=True)
    second_codes = to_e4m3(second / size).to(tl.uint8, bitcast=True)

    _store(packed_ptr + row * ROW, codes, power, first_codes, second_codes, turned_power, D, KEPT, PLAIN)
    place = tl.load(places_ptr + row).to(tl.int64)
    if place >= 0:
        _store(ring_ptr + place * ROW, codes, power, first_codes, second_codes, turned_power, D, KEPT, PLAIN)


def window_rows(
    x: Tensor, norm: Tensor, turns: Tensor, eps: float, places: Tensor, packed: Tensor, ring: Tensor
) -> None:
    """Norm, rotate and store rows x BF16 [M, D], which may be apart.

    turns: complex64 [M, F], D - 2F and 2F multiples of 32. packed: uint8 [M, row], written. ring: uint8 [A, row], of
    which row `places[i]` (int64 [M], -1: none) is written.
    """
    rows, channels = x.shape
    assert packed.shape == (rows, window_bytes(channels))
    if rows:
        turned = 2 * turns.shape[1]
        _window_rows[(rows,)](
            x, norm, torch.view_as_real(turns), places, packed, ring, x.stride(0), eps, D=channels, TURNED=turned,
            BLOCK=block(channels), PLAIN=block((channels - turned) // 32),
        )  # fmt: skip
