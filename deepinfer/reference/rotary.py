"""Rotary position embedding on the last channels of a head, with YaRN frequencies where the context is extended."""

import math

import torch
from torch import Tensor

from deepinfer.config.model import ModelConfig, RopeScaling


def frequencies(config: ModelConfig, compressed: bool) -> Tensor:
    """Angles per position step, FP32 [qk_rope_head_dim / 2].

    Window-only layers use ``rope_theta`` unscaled; layers that see compressed KV use ``compress_rope_theta``
    with YaRN's frequency interpolation (and no attention factor).
    """
    dim = config.qk_rope_head_dim
    if not compressed:
        return _powers(config.rope_theta, dim).float()
    plain = _powers(config.compress_rope_theta, dim)
    if config.rope_scaling is None:
        return plain.float()
    return _yarn(plain, config.compress_rope_theta, dim, config.rope_scaling).float()


def _powers(theta: float, dim: int) -> Tensor:
    return theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)


def _yarn(plain: Tensor, theta: float, dim: int, scaling: RopeScaling) -> Tensor:
    """Slow frequencies are divided by ``factor``, fast ones kept, with a linear ramp between the correction dims."""

    def correction(rotations: float) -> float:
        turns = scaling.original_max_position_embeddings / (rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(theta))

    low = max(math.floor(correction(scaling.beta_fast)), 0)
    high = min(math.ceil(correction(scaling.beta_slow)), dim - 1)
    index = torch.arange(dim // 2, dtype=torch.float64)
    ramp = ((index - low) / max(high - low, 1e-3)).clamp(0, 1)
    return plain / scaling.factor * ramp + plain * (1 - ramp)


def rotate(x: Tensor, positions: Tensor, freqs: Tensor, inverse: bool = False) -> Tensor:
    """Rotate adjacent pairs (2i, 2i + 1) of the last ``2 * len(freqs)`` channels by ``position * freqs[i]``.

    ``x`` [..., C]; ``positions`` broadcasts against ``x.shape[:-1]``; ``inverse`` rotates back.
    Angles and products are FP32; the result is cast to the dtype of ``x``.
    """
    kept, turned = x.split([x.shape[-1] - 2 * len(freqs), 2 * len(freqs)], dim=-1)
    angles = positions[..., None].float() * freqs
    cos, sin = angles.cos(), angles.sin()
    if inverse:
        sin = -sin
    even, odd = turned.float().unflatten(-1, (-1, 2)).unbind(-1)
    pairs = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return torch.cat((kept, pairs.flatten(-2).to(x.dtype)), dim=-1)
