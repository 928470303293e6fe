"""FP4 experts as the grouped products take them, made once from the stored rows.

Stored: two E2M1 codes a byte and an E8M0 scale per 32 columns. Here the block scales become exponent fields relative to
one FP32 scale a row, so that a decoded weight is an E4M3 number, codes and fields lie in the order in which the threads
of a GPU read them, and a tile is one contiguous copy. Same bytes, done once at loading.

A tile covers 128 rows and 128 columns: 8,192 bytes of codes, then 512 bytes of fields. In every 32-bit word of eight
codes the magnitudes keep their nibbles; the sign of code i is at bit 8i + 7, of code 4 + i at bit 8i + 3: there one
table look-up of four codes leaves room for it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.ops.linear import Fp8Weight

TILE_ROWS, TILE_COLUMNS, TILE_BYTES = 128, 128, 8704
STEP = 256
"""Rows and columns come in multiples of it."""
_CODE_BYTES = TILE_ROWS * TILE_COLUMNS // 2
_TOP_FIELD, _LOW_FIELD = 13, 2  # exponent fields of 1.0 that leave room for the codes 0.5 and 6 in E4M3
_LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class Fp4Experts:
    """E matrices: tiles uint8 [E, R/128, C/128, 8704], scales FP32 [E, R] in the order of the tiles' rows.

    paired: the rows are gate and up, in turn eight of each, so that one thread of a GPU holds both of a pair.
    """

    tiles: Tensor
    scales: Tensor
    paired: bool

    def __len__(self) -> int:
        return len(self.tiles)

    @property
    def shape(self) -> tuple[int, int, int]:
        """E, R, C."""
        return len(self.tiles), self.tiles.shape[1] * TILE_ROWS, self.tiles.shape[2] * TILE_COLUMNS

    def dequantized(self, expert: int) -> Tensor:
        """FP32 [R, C] of one expert, rows in the checkpoint's order (gate, then up)."""
        row_tiles, blocks = self.tiles.shape[1:3]
        tiles = self.tiles[expert]
        words = tiles[..., :_CODE_BYTES].reshape(row_tiles, blocks, 2, 2, 4, 8, 4, 16)
        words = words.permute(0, 2, 4, 3, 5, 1, 6, 7).reshape(row_tiles * TILE_ROWS, -1)
        fields = tiles[..., _CODE_BYTES:].reshape(row_tiles, blocks, 2, 4, 8, 2, 4)
        fields = fields.permute(0, 2, 3, 5, 4, 1, 6).reshape(row_tiles * TILE_ROWS, -1)
        factors = torch.exp2((fields >> 3).float() - 7) * self.scales[expert][:, None]
        values = _values(words).view(*factors.shape, 32) * factors[..., None]
        return (values.view(-1, 2, 8, words.shape[1] * 2).transpose(0, 1) if self.paired else values).reshape(
            len(words), -1
        )


Experts = Tensor | Fp8Weight | Fp4Experts
"""Stacked matrices [E, R, C] in any of the forms that `routed_experts` takes."""


def fits(rows: int, columns: int) -> bool:
    """Whether matrices of this shape can be tiled."""
    return rows % STEP == 0 and columns % STEP == 0


def tile_experts(codes: Tensor, scales: Tensor, paired: bool) -> tuple[Fp4Experts, int]:
    """Stored codes (uint8 or int8) [E, R, C/2] and E8M0 scales [E, R, C/32] -> (experts, blocks that were re-rounded).

    R and C as `fits` takes them. A block whose scale lies more than 2^11 under its row's largest cannot be expressed:
    its field is clamped, an error below 2^-13 of the row's largest block.
    """
    packed, exponents = codes.view(torch.uint8), scales.view(torch.uint8)
    if paired:
        packed, exponents = _pair(packed), _pair(exponents)
    fields, row_scales, rounded = _fold(packed, exponents)
    experts, rows, half = packed.shape
    # Rows: tile, half, warp, row or row + 8, row in eight. Columns: block of 128, quarter (32 columns, 16 bytes).
    shape, grid = (experts, rows // TILE_ROWS, 2, 4, 2, 8, half // 64, 4), (experts, rows // TILE_ROWS, half // 64)
    words = _move_signs(packed).view(*shape, 16).permute(0, 1, 6, 2, 4, 3, 5, 7, 8).reshape(*grid, _CODE_BYTES)
    spread = fields.view(shape).permute(0, 1, 6, 2, 3, 5, 4, 7).reshape(*grid, TILE_BYTES - _CODE_BYTES)
    return Fp4Experts(torch.cat((words, spread), -1), row_scales, paired), rounded


def _pair(rows: Tensor) -> Tensor:
    """[E, gate rows then up rows, ...] to eight of gate and eight of up in turn."""
    return rows.view(len(rows), 2, -1, 8, rows.shape[2]).transpose(1, 2).flatten(1, 3)


def _fold(packed: Tensor, exponents: Tensor) -> tuple[Tensor, Tensor, int]:
    """(fields << 3 as uint8 [E, R, C/32], FP32 [E, R], blocks that do not fit). A block of zeros fits any scale."""
    used = (packed & 0x77).view(*exponents.shape, 16).amax(-1) > 0
    top = torch.where(used, exponents, 0).amax(-1, keepdim=True).int()
    fields = _TOP_FIELD - (top - exponents.int())
    rounded = int((used & (fields < _LOW_FIELD)).sum())
    scales = torch.exp2(top[..., 0].float() - (_TOP_FIELD - 7 + 127))
    return (fields.clamp(_LOW_FIELD, _TOP_FIELD) << 3).to(torch.uint8), scales, rounded


_PLACES = tuple((4 * code + 3, 8 * code + 7 if code < 4 else 8 * code - 29) for code in range(8))
"""Where the sign of each code of a word is stored in a checkpoint, and where in a tile."""


def _move_signs(packed: Tensor) -> Tensor:
    """uint8 [..., C/2], C a multiple of 8, with the signs where a tile has them."""
    return _moved(packed, list(_PLACES))


def _values(words: Tensor) -> Tensor:
    """uint8 [..., C/2] with moved signs to FP32 [..., C]."""
    packed = _moved(words, [(before, after) for after, before in _PLACES])
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2).int()
    levels = torch.tensor([*_LEVELS, *(-level for level in _LEVELS)], device=words.device)
    return levels[codes]


def _moved(packed: Tensor, places: list[tuple[int, int]]) -> Tensor:
    words = packed.contiguous().view(torch.int32)
    moved = words & 0x77777777
    for before, after in places:
        bit = (words >> before) & 1
        moved |= bit << after
    return moved.view(torch.uint8)
