"""The PyTorch version: defines the operator, on any device with complex numbers."""

import torch
from torch import Tensor


def rotations(positions: Tensor, freqs: Tensor) -> Tensor:
    """positions int64 [...], freqs FP32 [F] -> complex64 [..., F]; angles in FP32."""
    angles = positions[..., None].float() * freqs
    return torch.complex(angles.cos(), angles.sin())


def rotate(x: Tensor, turns: Tensor) -> Tensor:
    """x [..., C] of any float dtype; turns complex64, broadcast against [..., F] -> [..., C] in the dtype of x."""
    kept = x.shape[-1] - 2 * turns.shape[-1]
    pairs = x[..., kept:].float().reshape(*x.shape[:-1], turns.shape[-1], 2)
    turned = torch.view_as_real(torch.view_as_complex(pairs) * turns).flatten(-2)
    return torch.cat((x[..., :kept], turned.to(x.dtype)), dim=-1)
