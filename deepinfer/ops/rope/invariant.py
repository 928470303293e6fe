"""The batch-invariant version: complex products written out, since fused ones round by where an element lies."""

import torch
from torch import Tensor

from deepinfer.ops.invariance import elementwise


def rotations(positions: Tensor, freqs: Tensor) -> Tensor:
    """positions int64 [...], freqs FP32 [F] -> complex64 [..., F]; angles in FP32."""
    angles = positions[..., None].float() * freqs
    return torch.complex(elementwise(torch.cos, angles), elementwise(torch.sin, angles))


def rotate(x: Tensor, turns: Tensor) -> Tensor:
    """x [..., C] of any float dtype; turns complex64, broadcast against [..., F] -> [..., C] in the dtype of x."""
    out = x.clone(memory_format=torch.contiguous_format)
    kept = x.shape[-1] - 2 * turns.shape[-1]
    even, odd = x[..., kept::2].float(), x[..., kept + 1 :: 2].float()
    parts = torch.view_as_real(turns.resolve_conj())
    cos, sin = parts[..., 0], parts[..., 1]
    out[..., kept::2] = (even * cos).sub_(odd * sin)
    out[..., kept + 1 :: 2] = (even * sin).add_(odd * cos)
    return out
