"""FP8 weights as the products take them, made once from the stored blocks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from deepinfer.checkpoint.formats import BLOCK, dequantize_fp4_rows


@dataclass(frozen=True)
class Fp8Weight:
    """A matrix, or a stack of them: codes E4M3 [..., R, C], scales FP32 [..., R]."""

    codes: Tensor
    scales: Tensor

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, index: int) -> "Fp8Weight":
        """One matrix of a stack."""
        return Fp8Weight(self.codes[index], self.scales[index])

    @property
    def shape(self) -> torch.Size:
        """Of the matrix."""
        return self.codes.shape

    def dequantized(self) -> Tensor:
        """FP32 [..., R, C]."""
        return self.codes.float() * self.scales[..., None]


class Fp8Rows(NamedTuple):
    """Rounded activations: codes E4M3 [..., C], scales FP32 [...]."""

    codes: Tensor
    scales: Tensor


Weight = Tensor | Fp8Weight


def fold_blocks(codes: Tensor, scales: Tensor) -> Fp8Weight:
    """Stored E4M3 [R, C] with E8M0 [ceil(R/32), ceil(C/32)] to a scale a row, the largest of its band of blocks.

    Codes of the other blocks move down by whole octaves: exact, except where a value falls below E4M3's normal range.
    Weights of Gaussian statistics change in one element of a million, by less than their own rounding.
    """
    factors = scales.to(torch.float32)
    top = factors.amax(1, keepdim=True)
    relative = (factors / top).repeat_interleave(BLOCK, 0)[: codes.shape[0]]
    relative = relative.repeat_interleave(BLOCK, 1)[:, : codes.shape[1]]
    moved = (codes.to(torch.float32) * relative).to(torch.float8_e4m3fn)
    return Fp8Weight(moved, top[:, 0].repeat_interleave(BLOCK)[: codes.shape[0]].contiguous())


def fold_rows(codes: Tensor, exponents: Tensor) -> Fp8Weight:
    """Stored FP4 matrices, int8 [E, R, C/2] with E8M0 scales as bytes [E, R, C/32], as E4M3 with a scale a row.

    An FP4 value times a power of two is an E4M3 number as long as it lies within 2^11 of the row's largest block.
    """
    factors = exponents.view(torch.float8_e8m0fnu).to(torch.float32)
    top = factors.amax(-1, keepdim=True) / 64  # E4M3 has room for 6 * 64
    return Fp8Weight(dequantize_fp4_rows(codes, factors / top).to(torch.float8_e4m3fn), top[..., 0])


def join(parts: Sequence[Fp8Weight]) -> Fp8Weight:
    """Matrices of equally many columns, one below the other."""
    codes = torch.cat([part.codes.view(torch.uint8) for part in parts]).view(torch.float8_e4m3fn)
    return Fp8Weight(codes, torch.cat([part.scales for part in parts]))
