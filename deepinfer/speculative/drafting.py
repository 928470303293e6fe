"""From a block's rows to drafted tokens: the serial tail, one token after the other."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.cache.storage import Caches
from deepinfer.model.drafter import Anchors, Drafter

Pick = Callable[[Tensor, int], Tensor]
"""Chooses a token for each anchor: logits FP32 [A, vocab], its own to overwrite, of the block's row k, and k -> [A]."""


@dataclass(frozen=True)
class Drafts:
    """A block of G tokens drafted after each of A anchors.

    tokens: int64 [A, G]. confidence: FP32 [A, G], logits of the chance that the target accepts a token, given that it
    accepted those before.
    """

    tokens: Tensor
    confidence: Tensor


def draft(drafter: Drafter, anchors: Anchors, caches: Caches, pick: Pick) -> Drafts:
    """Draft a block after each anchor; the caches hold the context keys of all tokens before it."""
    block = drafter.block(anchors, caches)
    previous = [anchors.ids]
    for place in range(drafter.block_size):
        previous.append(pick(block.base_logits[:, place] + drafter.bias(previous[-1]), place))
    before, tokens = torch.stack(previous[:-1], 1), torch.stack(previous[1:], 1)
    return Drafts(tokens, drafter.confidence(block.hidden, before))
