"""Penalties for tokens that came before: what was read is counted on the device, slot by slot."""

import torch
from torch import Tensor

from deepinfer.core.request import Request
from deepinfer.sampling.transfer import integers

_NEVER = 2**62


class Penalties:
    """Counts the generated tokens, and marks the prompt's, of the requests that ask for penalties.

    Memory: 5 bytes a slot and token of the vocabulary, taken with the first such request.
    """

    def __init__(self, slots: int, vocabulary: int, device: torch.device) -> None:
        self._counts = torch.zeros(slots, vocabulary, dtype=torch.int32, device=device)
        self._in_prompt = torch.zeros(slots, vocabulary, dtype=torch.bool, device=device)
        self._prompt_ends = torch.full((slots,), _NEVER, device=device)

    def begin(self, slot: int, request: Request | None) -> None:
        """The slot's next rows belong to this request, from its first token on; None: one without penalties."""
        if request is None:
            self._prompt_ends[slot] = _NEVER
            return
        self._prompt_ends[slot] = len(request.token_ids)
        self._counts[slot] = 0
        self._in_prompt[slot] = False
        self._in_prompt[slot, integers(request.token_ids, self._counts.device)] = True

    def read(self, slots: Tensor, positions: Tensor, ids: Tensor, certain: Tensor) -> None:
        """Count tokens that the model reads, int64 [N] each, where they are `certain`, bool [N]; not the prompts'."""
        self.count(slots, ids, certain & (positions >= self._prompt_ends[slots]))

    def count(self, slots: Tensor, ids: Tensor, counted: Tensor) -> None:
        """Count tokens int64 [...] of requests in `slots` int64 [...] where that is wanted, bool [...]."""
        self._counts.index_put_((slots, ids.clamp(min=0)), counted.int(), accumulate=True)

    def apply(self, logits: Tensor, slots: Tensor, penalties: Tensor, drafts: Tensor | None = None) -> Tensor:
        """The penalised FP32 logits [R, vocab] of rows in `slots` int64 [R].

        penalties: FP32 [3, R]: repetition, frequency, presence. drafts: int64 [R, K], tokens that count as generated in
        this row alone; -1: none.
        """
        repetition, frequency, presence = penalties[:, :, None]
        counts = self._counts[slots]
        if drafts is not None:
            counts.scatter_add_(1, drafts.clamp(min=0), (drafts >= 0).int())
        generated = counts > 0
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        penalised = torch.where(generated | self._in_prompt[slots], repeated, logits)
        return penalised.sub_(counts * frequency).sub_(generated * presence)
