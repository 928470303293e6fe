"""The vision tower: patches of one image to the embeddings of its image tokens.

A ViT (pre-norm blocks, full attention, two-dimensional rotary positions) and an aligner that merges squares of patches.
Letters: P patches, C tower width, H hidden size of the language model.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from deepinfer.config.model import VisionConfig
from deepinfer.ops.norm import rms_norm
from deepinfer.text.images import ImageInput

_EPS = 1e-6  # of the tower's norms


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


def embed_image(image: ImageInput, config: VisionConfig, weights: VisionWeights) -> Tensor:
    """The embeddings of an image's tokens, row-major: dense [rows * cols, H]."""
    grid = image.grid
    device, dtype = weights.w2.weight.device, weights.w2.weight.dtype
    x = weights.patch_embed(image.patches.to(device, dtype).flatten(1))
    angles = _angles(grid.vit_rows, grid.vit_cols, config, device)
    for block in weights.blocks:
        x = x + _attention(rms_norm(x, block.norm1, _EPS), angles, config.num_attention_heads, block)
        gate, up = functional.linear(rms_norm(x, block.norm2, _EPS), block.w1).chunk(2, dim=-1)
        x = x + functional.linear(functional.silu(gate) * up, block.w2)
    merged = _merge(rms_norm(x, weights.norm, _EPS), grid.vit_rows, grid.vit_cols, config.downsample_ratio)
    return weights.w2(functional.gelu(weights.w1(merged)))


def _angles(rows: int, cols: int, config: VisionConfig, device: torch.device) -> Tensor:
    """FP32 [P, head dim / 2]: the first half turns with the patch's row, the second with its column."""
    quarter = config.hidden_size // config.num_attention_heads // 4
    freqs = config.rope_theta ** (-torch.arange(quarter, dtype=torch.float32, device=device) / quarter)
    row = torch.arange(rows, device=device).repeat_interleave(cols)
    col = torch.arange(cols, device=device).repeat(rows)
    return torch.cat((row[:, None] * freqs, col[:, None] * freqs), dim=-1)


def _rotate_halves(x: Tensor, angles: Tensor) -> Tensor:
    """Turn channel i with channel i + d/2: x [P, heads, d], angles [P, d/2], in FP32."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def _attention(x: Tensor, angles: Tensor, heads: int, block: VisionBlockWeights) -> Tensor:
    """x [P, C] -> [P, C], every patch sees all."""
    q, k, v = (part.reshape(len(x), heads, -1) for part in block.wqkv(x).chunk(3, dim=-1))
    q, k = _rotate_halves(q, angles), _rotate_halves(k, angles)
    scores = torch.matmul(q.transpose(0, 1), k.permute(1, 2, 0)).float() * q.shape[-1] ** -0.5
    mixed = torch.matmul(scores.softmax(-1).to(x.dtype), v.transpose(0, 1))
    return block.wo(mixed.transpose(0, 1).flatten(1))


def _merge(x: Tensor, rows: int, cols: int, ratio: int) -> Tensor:
    """x [rows * cols, C] -> [merged rows * merged cols, C * ratio^2], the grid zero-padded at bottom and right."""
    image = x.T.reshape(1, -1, rows, cols)
    image = functional.pad(image, (0, -cols % ratio, 0, -rows % ratio))
    return functional.unfold(image, ratio, stride=ratio)[0].T
