"""Bitmasks of allowed tokens, applied to the rows that have one."""

import torch
from torch import Tensor

from deepinfer.core.sampled import TokenMasks


def apply_masks(logits: Tensor, masks: TokenMasks) -> None:
    """Set the tokens that a row's mask forbids to -inf in `logits` [S, vocab]; rows without a mask are not touched."""
    vocabulary = logits.shape[-1]
    shifts = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = (masks.bits[:, :, None] >> shifts & 1).flatten(1)[:, :vocabulary].bool()
    logits[masks.rows] = logits[masks.rows].masked_fill(~allowed, -torch.inf)
