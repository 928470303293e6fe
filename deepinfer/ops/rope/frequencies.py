"""Angles per position step, with YaRN's frequency interpolation."""

import math

import torch
from torch import Tensor

from deepinfer.config.model import RopeScaling


def frequencies(dim: int, theta: float, scaling: RopeScaling | None = None) -> Tensor:
    """FP32 [dim / 2]: `theta ** (-2i / dim)`, interpolated by YaRN if there is a scaling.

    YaRN divides slow frequencies by `factor` and keeps fast ones, with a linear ramp between the two channels whose
    wavelengths fit `beta_fast` and `beta_slow` times into the original context. There is no attention factor.
    """
    plain = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    if scaling is None:
        return plain.float()
    low = max(math.floor(_channel(scaling.beta_fast, dim, theta, scaling)), 0)
    high = min(math.ceil(_channel(scaling.beta_slow, dim, theta, scaling)), dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float64) - low) / max(high - low, 1e-3)).clamp(0, 1)
    return (plain / scaling.factor * ramp + plain * (1 - ramp)).float()


def _channel(rotations: float, dim: int, theta: float, scaling: RopeScaling) -> float:
    """The (fractional) channel pair that turns `rotations` times over the original context."""
    wavelengths = scaling.original_max_position_embeddings / (rotations * 2 * math.pi)
    return dim * math.log(wavelengths) / (2 * math.log(theta))
