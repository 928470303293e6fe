"""Bitmasks of allowed tokens, applied to the rows that have one."""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from deepinfer.core.sampled import TokenMasks


def byte_table(device: torch.device) -> Tensor:
    """FP32 [256, 8]: what the eight bits of each byte, low ones first, add to the logits of their tokens."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return torch.from_numpy(np.where(bits == 1, 0, -np.inf).astype(np.float32)).to(device)


def apply_masks(logits: Tensor, masks: TokenMasks, table: Tensor, at_once: int) -> None:
    """Set the tokens that a row's mask forbids to -inf in `logits` [S, vocab]; rows without a mask are not touched.

    table: that of `byte_table`. at_once: rows worked on together.
    """
    vocabulary = logits.shape[-1]
    for start in range(0, len(masks.rows), at_once):
        part = slice(start, start + at_once)
        rows, bits = masks.rows[part], masks.bits[part]
        added = functional.embedding(bits.contiguous().view(torch.uint8).int(), table).flatten(1)
        logits[rows] = added[:, :vocabulary].add_(logits[rows])
