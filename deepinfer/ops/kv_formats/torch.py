"""The PyTorch version: defines the stored bytes, on any device.

Vectorised, without data-dependent control flow. Elements are encoded by comparing with the midpoints between levels, so
it shares no arithmetic with `checkpoint.formats`, against which it is tested. Every stored value is a BF16 number: its
element has at most 4 significant bits, its scale as many; so unpacking to BF16 takes no FP32 in between.
"""

from functools import lru_cache

import torch
from torch import Tensor

from deepinfer.ops.kv_formats.sizes import LATENT_BLOCK, POWER_BLOCK

_E4M3_MAX = 448.0
_E2M1_MAX = 6.0
_E2M1_LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_WINDOW_FLOOR = 1e-4  # smallest amax that a window scale is made for
_LATENT_FLOOR = 6 * 2.0**-9  # so that the scale is at least the smallest positive E4M3 value
_INDEX_FLOOR = 6 * 2.0**-126  # so that the scale is a normal FP32 number
_NAN_POWER = 255  # E8M0 code of NaN


def pack_window(x: Tensor) -> Tensor:
    """x [..., D] of any float dtype, D a multiple of 32 -> uint8 [..., D + D/32]."""
    blocks, amax = _blocks(x, POWER_BLOCK)
    power = _power_above(amax.clamp(min=_WINDOW_FLOOR) / _E4M3_MAX)
    codes = _e4m3(blocks / _from_power(power)).flatten(-2)
    return torch.cat((codes, _power_bytes(power, amax)), -1)


def unpack_window(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """uint8 [..., D + D/32] -> [..., D] of `dtype`."""
    channels = stored.shape[-1] * POWER_BLOCK // (POWER_BLOCK + 1)
    values = _e4m3_values(stored[..., :channels], _exact(dtype))
    return _scaled(values, _from_power(stored[..., channels:]), POWER_BLOCK).to(dtype)


def pack_latent(x: Tensor) -> Tensor:
    """x [..., D] of any float dtype, D a multiple of 16 -> uint8 [..., D/2 + D/16]."""
    blocks, amax = _blocks(x, LATENT_BLOCK)
    scales = _e4m3(amax.clamp(min=_LATENT_FLOOR) / _E2M1_MAX)
    codes = _e2m1(blocks / scales.view(torch.float8_e4m3fn).to(torch.float32)).flatten(-2)
    return torch.cat((_nibbles(codes), scales.squeeze(-1)), -1)


def unpack_latent(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """uint8 [..., D/2 + D/16] -> [..., D] of `dtype`."""
    half = stored.shape[-1] * LATENT_BLOCK // (LATENT_BLOCK + 2)
    scales = stored[..., half:].contiguous().view(torch.float8_e4m3fn).to(torch.float32)
    return _scaled(_e2m1_values(stored[..., :half], _exact(dtype)), scales, LATENT_BLOCK).to(dtype)


def pack_index(x: Tensor) -> Tensor:
    """x [..., D] of any float dtype, D a multiple of 32 -> uint8 [..., D/2 + D/32]."""
    blocks, amax = _blocks(x, POWER_BLOCK)
    power = _power_above(amax.clamp(min=_INDEX_FLOOR) / _E2M1_MAX)
    codes = _e2m1(blocks / _from_power(power)).flatten(-2)
    return torch.cat((_nibbles(codes), _power_bytes(power, amax)), -1)


def unpack_index(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """uint8 [..., D/2 + D/32] -> [..., D] of `dtype`."""
    half = stored.shape[-1] * POWER_BLOCK // (POWER_BLOCK + 2)
    values = _e2m1_values(stored[..., :half], _exact(dtype))
    return _scaled(values, _from_power(stored[..., half:]), POWER_BLOCK).to(dtype)


def _blocks(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """(FP32 [..., D/size, size], its largest magnitudes [..., D/size, 1])."""
    blocks = x.to(torch.float32).reshape(*x.shape[:-1], x.shape[-1] // size, size)
    return blocks, blocks.abs().amax(-1, keepdim=True)


def _exact(dtype: torch.dtype) -> torch.dtype:
    """The type to unpack in: one in which every product of element and scale is exact."""
    return dtype if dtype is torch.bfloat16 else torch.float32


def _scaled(values: Tensor, scales: Tensor, size: int) -> Tensor:
    """Multiply values [..., D], in place, by the scale of their block, FP32 scales [..., D/size]."""
    values.view(*scales.shape, size).mul_(scales.to(values.dtype).unsqueeze(-1))
    return values


def _power_above(x: Tensor) -> Tensor:
    """Biased exponent (int32) of the smallest power of two >= x: any mantissa bit carries into the exponent."""
    return (x.view(torch.int32) + 0x7FFFFF) >> 23


def _from_power(power: Tensor) -> Tensor:
    """Biased exponents to FP32 powers of two; NaN for the code of NaN."""
    bits = power.to(torch.int32) << 23
    return torch.where(power == _NAN_POWER, torch.nan, bits.view(torch.float32))


def _power_bytes(power: Tensor, amax: Tensor) -> Tensor:
    """[..., blocks, 1] exponents to the stored bytes [..., blocks]; a block with a NaN is marked as NaN."""
    return torch.where(amax.isnan(), _NAN_POWER, power).to(torch.uint8).squeeze(-1)


def _e4m3(x: Tensor) -> Tensor:
    """FP32 to E4M3 codes, nearest with ties to even; the cast alone would turn what lies beyond 448 into NaN."""
    return x.clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def _e4m3_values(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """E4M3 codes (uint8) to fresh values; far faster on a CPU than its cast from that type.

    Sign, exponent and mantissa, put where FP16 has them, read as the value times 2^-8, the distance of the biases. The
    NaN code alone would read as 480, but a block with a NaN has a scale that makes all of it NaN.
    """
    bits = (codes.contiguous().view(torch.int8).to(torch.int16) << 7) & ~0x4000  # the sign had spread over two bits
    return bits.view(torch.float16).to(dtype).mul_(2.0**8)


def _e2m1(x: Tensor) -> Tensor:
    """FP32 to E2M1 codes (uint8): the sign bit, then how many midpoints the magnitude has passed.

    A magnitude on a midpoint goes to the even code, so it passes the midpoint only if the code above is even.
    """
    magnitude = x.abs()
    code = torch.signbit(x).to(torch.uint8) << 3
    for above in range(1, len(_E2M1_LEVELS)):
        midpoint = (_E2M1_LEVELS[above - 1] + _E2M1_LEVELS[above]) / 2
        code += magnitude >= midpoint if above % 2 == 0 else magnitude > midpoint
    return code


def _nibbles(codes: Tensor) -> Tensor:
    """Four-bit codes [..., D] to bytes [..., D/2], the even channel in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def _e2m1_values(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes [..., D/2] to fresh values [..., D], by a table of what each byte holds."""
    pairs = torch.nn.functional.embedding(packed.to(torch.int32), _byte_values(packed.device, dtype))
    return pairs.flatten(-2)


@lru_cache
def _byte_values(device: torch.device, dtype: torch.dtype) -> Tensor:
    """[256, 2]: the low and the high nibble's value of every byte."""
    levels = torch.tensor([*_E2M1_LEVELS, *(-level for level in _E2M1_LEVELS)], device=device, dtype=dtype)
    byte = torch.arange(256, device=device)
    return torch.stack((levels[byte & 15], levels[byte >> 4]), -1)
