"""From a block's rows to drafted tokens: the serial tail, one token after the other."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.cache.storage import Caches
from deepinfer.model.drafter import Anchors, Drafter

Pick = Callable[[Tensor, int], Tensor]
"""Chooses a token for each anchor: logits FP32 [A, vocab] of the block's row k, and k -> int64 [A]."""


@dataclass(frozen=True)
class Drafts:
    """A block of G tokens drafted after each of A anchors.

    tokens: int64 [A, G]. logits: FP32 [A, G, vocab], what they were chosen from. confidence: FP32 [A, G], logits of
    the chance that the target accepts a token, given that it accepted those before.
    """

    tokens: Tensor
    logits: Tensor
    confidence: Tensor


def draft(drafter: Drafter, anchors: Anchors, caches: Caches, pick: Pick) -> Drafts:
    """Draft a block after each anchor; the caches hold the context keys of all tokens before it."""
    block = drafter.block(anchors, caches)
    logits, previous = block.base_logits, [anchors.ids]
    for place in range(drafter.block_size):
        logits[:, place] += drafter.bias(previous[-1])
        previous.append(pick(logits[:, place], place))
    before, tokens = torch.stack(previous[:-1], 1), torch.stack(previous[1:], 1)
    return Drafts(tokens, logits, drafter.confidence(block.hidden, before))


def most_probable(logits: Tensor, place: int) -> Tensor:
    """A `Pick` that takes the best token."""
    return logits.argmax(-1)
