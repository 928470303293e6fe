"""The newest block of drafts of every slot, on the device."""

import torch
from torch import Tensor

from deepinfer.speculative.drafting import Drafts


class Blocks:
    """What was drafted after each slot's newest token.

    tokens: int64 [slots, G]. confidence: FP32 [slots, G], logits as the drafter gave them. survival: FP64 [slots, G],
    the chance that a draft and all before it will be accepted.
    Which slots hold a block is known to the host alone: `fresh` are the requests whose block no step has run yet.
    """

    def __init__(self, slots: int, block: int, device: torch.device) -> None:
        self.tokens = torch.zeros(slots, block, dtype=torch.int64, device=device)
        self.confidence = torch.zeros(slots, block, device=device)
        self.survival = torch.zeros(slots, block, dtype=torch.float64, device=device)
        self.fresh: set[int] = set()
        self._log_weights: Tensor | None = None

    def put(self, slots: Tensor, drafts: Drafts, survival: Tensor) -> None:
        """Keep what was drafted for the slots int64 [A]; survival: FP64 [A, G]."""
        self.tokens[slots], self.confidence[slots], self.survival[slots] = drafts.tokens, drafts.confidence, survival

    def keep_log_weights(self, slots: Tensor, log_weights: Tensor) -> None:
        """Keep what drafts were drawn from, [A, G, vocab], for the slots int64 [A] whose drafts may be rejected."""
        if self._log_weights is None:  # 4 bytes a token of the vocabulary and draft: not for greedy requests
            shape = (*self.tokens.shape, log_weights.shape[-1])
            self._log_weights = torch.zeros(shape, dtype=torch.float32, device=self.tokens.device)
        self._log_weights[slots] = log_weights

    def log_weights(self, slots: Tensor, places: Tensor) -> Tensor:
        """FP32 [J, vocab], what the drafts at `places` of `slots` (int64 [J]) were drawn from."""
        if self._log_weights is None:
            raise ValueError("no block was drawn from log-weights that were kept")
        return self._log_weights[slots, places]
