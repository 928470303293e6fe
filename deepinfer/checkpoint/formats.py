"""Number formats: the three cache round trips of the forward pass and the three quantised weight layouts.

All are block formats: a block of neighbouring values shares one scale, chosen so that the largest magnitude
reaches the top of the element format (448 for E4M3, 6 for E2M1). A power-of-two scale is the next power of two
at or above `amax / top`, read off the bits of that FP32 quotient, so nothing saturates and scaling is exact.
Elements round to nearest, ties to the even code; the sign of zero survives.

Plain, vectorised PyTorch without data-dependent control flow: any device, and `torch.compile` can take it.
"""

import torch
from torch import Tensor

E4M3_MAX = 448.0
E2M1_MAX = 6.0
_E4M3_TINY = 2.0**-9  # smallest positive E4M3 value
_FP32_TINY = 2.0**-126  # smallest normal FP32 value: floor of the power-of-two scales
BLOCK = 32  # values (or rows and columns of a weight block) that share a power-of-two scale
LATENT_BLOCK = 16  # values of a compressed latent that share an E4M3 scale


def window_fp8(x: Tensor) -> Tensor:
    """Round trip of the window KV: E4M3 values, one power-of-two scale per 32 channels, amax floored at 1e-4.

    x: [..., C], C a multiple of 32, any float dtype; computed in FP32. Returns the same shape and dtype.
    """
    blocks = _split(x, BLOCK)
    scale = _power_of_two(_amax(blocks, -1).clamp(min=1e-4) / E4M3_MAX)
    return (_round_e4m3(blocks / scale) * scale).reshape(x.shape).to(x.dtype)


def latent_nvfp4(x: Tensor) -> Tensor:
    """Round trip of the compressed KV (NVFP4): E2M1 values, one E4M3 scale per 16 channels.

    The scale is the E4M3 rounding of amax / 6, at least the smallest E4M3 value. It may round down, so the largest
    values of a block can saturate. x: [..., C], C a multiple of 16, any float dtype. Returns the same shape and dtype.
    """
    blocks = _split(x, LATENT_BLOCK)
    scale = _round_e4m3(_amax(blocks, -1).clamp(min=E2M1_MAX * _E4M3_TINY) / E2M1_MAX)
    return (_round_e2m1(blocks / scale) * scale).reshape(x.shape).to(x.dtype)


def index_mxfp4(x: Tensor) -> Tensor:
    """Round trip of the indexer's queries and keys (MXFP4): E2M1 values, one power-of-two scale per 32 channels.

    x: [..., C], C a multiple of 32, any float dtype; computed in FP32. Returns the same shape and dtype.
    """
    values, scale = _scaled_e2m1(_split(x, BLOCK), -1)
    return (values * scale).reshape(x.shape).to(x.dtype)


def quantize_fp8_blocks(w: Tensor) -> tuple[Tensor, Tensor]:
    """Dense weights: w [R, C] -> (E4M3 [R, C], E8M0 [ceil(R/32), ceil(C/32)]); blocks at the edges may be short."""
    rows, columns = w.shape
    values, scale = _scaled_e4m3(_tiles(w), (1, 3))
    grid_rows, grid_columns = scale.shape[0], scale.shape[2]
    codes = values.reshape(grid_rows * BLOCK, grid_columns * BLOCK)[:rows, :columns]
    return codes.to(torch.float8_e4m3fn).contiguous(), _encode_e8m0(scale.reshape(grid_rows, grid_columns))


def dequantize_fp8_blocks(q: Tensor, scale: Tensor) -> Tensor:
    """Inverse of `quantize_fp8_blocks`: (E4M3 [R, C], E8M0 [ceil(R/32), ceil(C/32)]) -> FP32 [R, C]."""
    rows, columns = q.shape
    factors = scale.to(torch.float32).repeat_interleave(BLOCK, 0)[:rows]
    return q.to(torch.float32) * factors.repeat_interleave(BLOCK, 1)[:, :columns]


def quantize_fp8_rows(w: Tensor) -> tuple[Tensor, Tensor]:
    """Engram table: w [R, C], C a multiple of 32 -> (E4M3 [R, C], E8M0 [R, C/32])."""
    values, scale = _scaled_e4m3(_split(w, BLOCK), (-1,))
    return values.reshape(w.shape).to(torch.float8_e4m3fn).contiguous(), _encode_e8m0(scale.squeeze(-1))


def dequantize_fp8_rows(q: Tensor, scale: Tensor) -> Tensor:
    """Inverse of `quantize_fp8_rows`: (E4M3 [R, C], E8M0 [R, C/32]) -> FP32 [R, C]."""
    return (_split(q, BLOCK) * scale.to(torch.float32).unsqueeze(-1)).reshape(q.shape)


def quantize_fp4_rows(w: Tensor) -> tuple[Tensor, Tensor]:
    """Routed experts: w [..., R, C], C a multiple of 32 -> (int8 [..., R, C/2], E8M0 [..., R, C/32]).

    A byte holds two E2M1 codes (sign bit, then the index of the magnitude): the even column in the low nibble.
    """
    values, scale = _scaled_e2m1(_split(w, BLOCK), -1)
    codes = _encode_e2m1(values.reshape(w.shape))
    packed = codes[..., 0::2] | (codes[..., 1::2] << 4)
    return packed.contiguous().view(torch.int8), _encode_e8m0(scale.squeeze(-1))


def dequantize_fp4_rows(q: Tensor, scale: Tensor) -> Tensor:
    """Inverse of `quantize_fp4_rows`: (int8 [..., R, C/2], E8M0 [..., R, C/32]) -> FP32 [..., R, C]."""
    packed = q.view(torch.uint8)
    values = _decode_e2m1(torch.stack((packed & 15, packed >> 4), -1).flatten(-2))
    return (_split(values, BLOCK) * scale.to(torch.float32).unsqueeze(-1)).flatten(-2)


def fp8_blocks_round_trip(w: Tensor) -> Tensor:
    """What `quantize_fp8_blocks` keeps of w [R, C], as FP32 [R, C], without making the stored form."""
    values, scale = _scaled_e4m3(_tiles(w), (1, 3))
    grid_rows, grid_columns = scale.shape[0], scale.shape[2]
    return (values * scale).reshape(grid_rows * BLOCK, grid_columns * BLOCK)[: w.shape[0], : w.shape[1]]


def fp8_rows_round_trip(w: Tensor) -> Tensor:
    """What `quantize_fp8_rows` keeps of w [..., C], C a multiple of 32, as FP32 of the same shape."""
    values, scale = _scaled_e4m3(_split(w, BLOCK), (-1,))
    return (values * scale).reshape(w.shape)


def fp4_rows_round_trip(w: Tensor) -> Tensor:
    """What `quantize_fp4_rows` keeps of w [..., C], C a multiple of 32, as FP32 of the same shape."""
    values, scale = _scaled_e2m1(_split(w, BLOCK), -1)
    return (values * scale).reshape(w.shape)


def _split(x: Tensor, block: int) -> Tensor:
    """[..., C] -> FP32 [..., C/block, block]."""
    return x.to(torch.float32).reshape(*x.shape[:-1], x.shape[-1] // block, block)


def _tiles(w: Tensor) -> Tensor:
    """[R, C] -> FP32 [ceil(R/32), 32, ceil(C/32), 32], padded with zeros, which never change a block's scale."""
    rows, columns = w.shape
    padded = torch.nn.functional.pad(w.to(torch.float32), (0, -columns % BLOCK, 0, -rows % BLOCK))
    return padded.reshape(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)


def _amax(x: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    return x.abs().amax(dim, keepdim=True)


def _power_of_two(x: Tensor) -> Tensor:
    """The smallest power of two >= x, for normal positive FP32 x: any mantissa bit carries into the exponent."""
    bits = x.view(torch.int32) + 0x7FFFFF
    return (bits & 0x7F800000).view(torch.float32)


def _scaled_e4m3(x: Tensor, dim: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """(E4M3 values as FP32, power-of-two scale) of blocks that span `dim`."""
    scale = _power_of_two(_amax(x, dim).clamp(min=E4M3_MAX * _FP32_TINY) / E4M3_MAX)
    return _round_e4m3(x / scale), scale


def _scaled_e2m1(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """(E2M1 values as FP32, power-of-two scale) of blocks that span `dim`."""
    scale = _power_of_two(_amax(x, dim).clamp(min=E2M1_MAX * _FP32_TINY) / E2M1_MAX)
    return _round_e2m1(x / scale), scale


def _round_e4m3(x: Tensor) -> Tensor:
    """FP32 to the nearest E4M3 value, as FP32. The cast alone would turn what lies beyond 448 into NaN."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).to(torch.float32)


def _round_e2m1(x: Tensor) -> Tensor:
    """FP32 to the nearest E2M1 value, as FP32: steps of 1/2 below 2, of 1 below 4, of 2 up to 6.

    Within each range the even codes are the even multiples of the step, so rounding half to even fits the ties.
    """
    x = x.clamp(-E2M1_MAX, E2M1_MAX)
    magnitude = x.abs()
    step = 0.5 + 0.5 * (magnitude >= 2) + 1.0 * (magnitude >= 4)
    return torch.round(x / step) * step


def _encode_e2m1(values: Tensor) -> Tensor:
    """E2M1 values to their four-bit codes, as uint8; the inverse of `_decode_e2m1`."""
    magnitude = values.abs()
    index = torch.where(magnitude < 2, 2 * magnitude, torch.where(magnitude < 4, magnitude + 2, magnitude / 2 + 4))
    return index.to(torch.uint8) | (torch.signbit(values).to(torch.uint8) << 3)


def _decode_e2m1(codes: Tensor) -> Tensor:
    """Four-bit codes (uint8) to FP32: the low three bits are the magnitudes 0, 1/2, 1, 3/2, 2, 3, 4, 6."""
    index = (codes & 7).to(torch.float32)
    magnitude = torch.where(index < 4, index / 2, torch.where(index < 6, index - 2, 2 * index - 8))
    return torch.where(codes >= 8, -magnitude, magnitude)


def _encode_e8m0(scale: Tensor) -> Tensor:
    """Powers of two (FP32, normal) to E8M0, which is the FP32 exponent byte."""
    return (scale.contiguous().view(torch.int32) >> 23).to(torch.uint8).view(torch.float8_e8m0fnu)
