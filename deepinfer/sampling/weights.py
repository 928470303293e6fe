"""Weights of tokens as whole numbers, and draws from them.

A log-weight x, 0 for the likeliest token, counts as floor(exp(x) * 2^44). Sums of whole numbers are the same in any
order, so neither the batch, nor threads, nor the device's way of adding up can change a draw; and a vocabulary of 2^18
tokens stays below 2^62. A token that is less than 2^-44 times as likely as the likeliest one counts as nothing.
"""

import torch
from torch import Tensor
from torch.nn import functional

SCALE = 2.0**44
_NOTHING = -31.0  # exp(-31) * 2^44 = 0.6
_BLOCK = 256


def whole_weights(log_weights: Tensor) -> Tensor:
    """int64 [R, V] of FP32 [R, V] log-weights <= 0."""
    # What counts as nothing is lifted to a number that still does: exponentials of tiny results take far longer.
    return log_weights.clamp(min=_NOTHING).exp_().mul_(SCALE).long()


def first_largest(values: Tensor) -> Tensor:
    """int64 [R]: the place of the first of the largest of `values` [R, V], as argmax, in a fraction of its time."""
    blocks = _blocks(values, -torch.inf)
    block = blocks.amax(-1).argmax(-1)
    return block * _BLOCK + _chosen(blocks, block).argmax(-1)


def pick(log_weights: Tensor, numbers: Tensor) -> Tensor:
    """int64 [R]: the first token whose cumulative share exceeds the row's number, FP64 [R] in [0, 1).

    log_weights: FP32 [R, V], 0 for the likeliest token.
    """
    blocks = _blocks(whole_weights(log_weights), 0)
    before = blocks.sum(-1).cumsum(-1)
    total = before[:, -1]
    # A product that rounds up to the total would fall behind the last token.
    target = torch.minimum((numbers * total).long(), total - 1)[:, None]
    # Rows that are no numbers lead anywhere; they must not lead out of the row.
    block = torch.searchsorted(before, target, right=True).squeeze(-1).clamp_(max=blocks.shape[1] - 1)
    inside = _chosen(blocks, block)
    target -= before.gather(-1, block[:, None]) - inside.sum(-1, keepdim=True)
    return block * _BLOCK + torch.searchsorted(inside.cumsum(-1), target, right=True).squeeze(-1).clamp_(max=_BLOCK - 1)


def _blocks(values: Tensor, fill: float) -> Tensor:
    """`values` [R, V] as [R, blocks, 256], filled up at the end."""
    rows, width = values.shape
    if width % _BLOCK:
        values = functional.pad(values, (0, -width % _BLOCK), value=fill)
    return values.view(rows, -1, _BLOCK)


def _chosen(blocks: Tensor, block: Tensor) -> Tensor:
    """[R, 256]: of each row the block with the number in `block` [R]."""
    return blocks[torch.arange(len(blocks), device=blocks.device), block]
