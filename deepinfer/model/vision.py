"""The vision tower: patches of images to the embeddings of their image tokens.

A ViT (pre-norm blocks, full attention, two-dimensional rotary positions) and an aligner that merges squares of patches.
Images of any sizes lie one after the other; only attention and the aligner know where one ends, so none sees another.
Letters: P patches of one image, N of all of them, C tower width, H hidden size of the language model.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor
from torch.nn import functional

from deepinfer.config.model import VisionConfig
from deepinfer.ops.norm import rms_norm
from deepinfer.text.images import ImageGrid, ImageInput

_EPS = 1e-6  # of the tower's norms

Turns = tuple[Tensor, Tensor]
"""Cosines and sines of every patch's angles: FP32 [N, 1, head dim / 2]."""


@dataclass(frozen=True)
class Affine:
    """A linear map with bias, dense: [out, in] and [out]."""

    weight: Tensor
    bias: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        return functional.linear(x, self.weight, self.bias)


@dataclass(frozen=True)
class VisionBlockWeights:
    """One block; norms FP32 [C], the rest dense."""

    norm1: Tensor
    wqkv: Affine  # [3C, C]: query, key, value
    wo: Affine  # [C, C]
    norm2: Tensor
    w1: Tensor  # [2 * width, C]: gate, then up
    w2: Tensor  # [C, width]


@dataclass(frozen=True)
class VisionWeights:
    """Tower, aligner and the embeddings of the tokens around an image's cells."""

    patch_embed: Affine  # [C, 3 * patch^2]
    blocks: tuple[VisionBlockWeights, ...]
    norm: Tensor  # FP32 [C]
    w1: Affine  # [H, C * merged patches]
    w2: Affine  # [H, H]
    markers: Tensor  # dense [4, H], by token type: start, (image), newline, end


def embed_images(images: Sequence[ImageInput], config: VisionConfig, weights: VisionWeights) -> list[Tensor]:
    """The embeddings of each image's tokens, row-major: dense [rows * cols, H]."""
    grids = [image.grid for image in images]
    x = run_blocks(enter_tower(images, weights), grids, config, weights.blocks)
    return leave_tower(x, grids, config, weights)


def enter_tower(images: Sequence[ImageInput], weights: VisionWeights) -> Tensor:
    """What the first block reads: dense [N, C]."""
    device, dtype = weights.w2.weight.device, weights.w2.weight.dtype
    return weights.patch_embed(torch.cat([image.patches.to(device, dtype).flatten(1) for image in images]))


def run_blocks(
    x: Tensor, grids: Sequence[ImageGrid], config: VisionConfig, blocks: Sequence[VisionBlockWeights]
) -> Tensor:
    """Some of the tower's blocks, x [N, C] -> [N, C]; running them in several goes gives the same to the bit."""
    angles = torch.cat([_angles(grid.vit_rows, grid.vit_cols, config, x.device) for grid in grids])
    turns = angles.cos()[:, None], angles.sin()[:, None]
    for block in blocks:
        x = x + _attention(rms_norm(x, block.norm1, _EPS), turns, grids, config.num_attention_heads, block)
        gate, up = functional.linear(rms_norm(x, block.norm2, _EPS), block.w1).chunk(2, dim=-1)
        x = x + functional.linear(functional.silu(gate) * up, block.w2)
    return x


def leave_tower(x: Tensor, grids: Sequence[ImageGrid], config: VisionConfig, weights: VisionWeights) -> list[Tensor]:
    """From the last block's output [N, C] to each image's embeddings, dense [rows * cols, H]."""
    parts = torch.split(rms_norm(x, weights.norm, _EPS), [grid.patches for grid in grids])
    merged = [
        _merge(part, grid.vit_rows, grid.vit_cols, config.downsample_ratio)
        for part, grid in zip(parts, grids, strict=True)
    ]
    cells = weights.w2(functional.gelu(weights.w1(torch.cat(merged))))
    return list(torch.split(cells, [grid.rows * grid.cols for grid in grids]))


def _angles(rows: int, cols: int, config: VisionConfig, device: torch.device) -> Tensor:
    """FP32 [P, head dim / 2]: the first half turns with the patch's row, the second with its column."""
    quarter = config.hidden_size // config.num_attention_heads // 4
    freqs = config.rope_theta ** (-torch.arange(quarter, dtype=torch.float32, device=device) / quarter)
    row = torch.arange(rows, device=device).repeat_interleave(cols)
    col = torch.arange(cols, device=device).repeat(rows)
    return torch.cat((row[:, None] * freqs, col[:, None] * freqs), dim=-1)


def _rotate_halves(x: Tensor, turns: Turns) -> Tensor:
    """Turn channel i with channel i + d/2: x [N, heads, d], in FP32."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = turns
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def _attention(x: Tensor, turns: Turns, grids: Sequence[ImageGrid], heads: int, block: VisionBlockWeights) -> Tensor:
    """x [N, C] -> [N, C], every patch sees all of its image."""
    q, k, v = (part.reshape(len(x), heads, -1) for part in block.wqkv(x).chunk(3, dim=-1))
    q, k = _rotate_halves(q, turns), _rotate_halves(k, turns)
    mixed = torch.empty_like(q)
    for start, images, patches in _runs(grids):
        rows = slice(start, start + images * patches)
        one, other, values = (part[rows].view(images, patches, heads, -1).transpose(1, 2) for part in (q, k, v))
        mixed[rows] = functional.scaled_dot_product_attention(one, other, values).transpose(1, 2).flatten(0, 1)
    return block.wo(mixed.flatten(1))


def _runs(grids: Sequence[ImageGrid]) -> Iterator[tuple[int, int, int]]:
    """(first row, images, patches of each) for every stretch of images with equally many patches."""
    start = 0
    for patches, run in groupby(grid.patches for grid in grids):
        images = len(list(run))
        yield start, images, patches
        start += images * patches


def _merge(x: Tensor, rows: int, cols: int, ratio: int) -> Tensor:
    """x [rows * cols, C] -> [merged rows * merged cols, C * ratio^2], the grid zero-padded at bottom and right."""
    image = x.T.reshape(1, -1, rows, cols)
    image = functional.pad(image, (0, -cols % ratio, 0, -rows % ratio))
    return functional.unfold(image, ratio, stride=ratio)[0].T
