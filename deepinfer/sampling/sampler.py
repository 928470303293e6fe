"""From a step's logits to its tokens: the one owner of all sampling state."""

from collections.abc import Sequence

import torch
from torch import Tensor

from deepinfer.core.request import Request
from deepinfer.core.sampled import Sampled, SampledRow, TokenMasks
from deepinfer.sampling.masks import apply_masks
from deepinfer.sampling.random import Purpose, uniform


class Sampler:
    """Draws the tokens of any mix of requests; a row's token does not depend on the other rows.

    `sample` is `adjust` and then `draw`; who verifies drafts calls these two with rows of its own.
    """

    def __init__(self, forbidden: Tensor) -> None:
        """`forbidden`: bool [vocab] on the device of the logits, the tokens that nobody may draw."""
        self._forbidden = forbidden
        self._requests: dict[int, Request] = {}

    def admit(self, request_id: int, request: Request) -> None:
        """Take note of a request before its first row."""
        self._requests[request_id] = request

    def forget(self, request_id: int) -> None:
        """Drop a request that no later row belongs to."""
        del self._requests[request_id]

    def sample(self, logits: Tensor, rows: Sequence[SampledRow], masks: TokenMasks | None = None) -> Sampled:
        """Draw a token a row of the FP32 `logits` [S, vocab], which are overwritten; nothing waits for the device."""
        return Sampled(self.draw(self.adjust(logits, rows, masks), rows))

    def adjust(self, logits: Tensor, rows: Sequence[SampledRow], masks: TokenMasks | None = None) -> Tensor:
        """The log-weights [S, vocab] by which tokens are drawn, up to a constant a row; -inf: never.

        `logits` FP32 [S, vocab] are overwritten. Rows at temperature 0 stay undivided.
        """
        logits.masked_fill_(self._forbidden, -torch.inf)
        if masks is not None:
            apply_masks(logits, masks)
        temperatures = [self._temperature(row) for row in rows]
        if any(value not in (0, 1) for value in temperatures):
            divisors = torch.tensor([value or 1 for value in temperatures], dtype=torch.float64, device=logits.device)
            # The largest log-weight becomes 0 before the division, so that nothing overflows.
            logits = ((logits - logits.amax(-1, keepdim=True)).double() / divisors[:, None]).float()
        return logits

    def draw(self, log_weights: Tensor, rows: Sequence[SampledRow], purpose: Purpose = Purpose.SAMPLE) -> Tensor:
        """int64 [S]: the first of the heaviest tokens at temperature 0, else one drawn in proportion to its weight.

        log_weights: [S, vocab], as `adjust` returns them. The random number is counted by seed, position and purpose.
        """
        tokens = torch.argmax(log_weights, dim=-1)
        drawn = [place for place, row in enumerate(rows) if self._temperature(row) > 0]
        if drawn:
            chosen = [rows[place] for place in drawn]
            seeds = [self._requests[row.request_id].seed for row in chosen]
            numbers = torch.from_numpy(uniform(seeds, [row.position for row in chosen], purpose))
            places = torch.tensor(drawn, device=log_weights.device)
            tokens[places] = pick(log_weights[places], numbers.to(log_weights.device))
        return tokens

    def _temperature(self, row: SampledRow) -> float:
        return self._requests[row.request_id].params.temperature


def pick(log_weights: Tensor, numbers: Tensor) -> Tensor:
    """int64 [R]: the first token whose cumulative share exceeds the row's number, FP64 [R] in [0, 1)."""
    mass = torch.softmax(log_weights.double(), dim=-1).cumsum(dim=-1)
    total = mass[:, -1:].contiguous()
    chosen = torch.searchsorted(mass, numbers[:, None] * total, right=True)
    last = torch.searchsorted(mass, total)  # the last token with any mass: rounding may lift a target to the total
    return torch.minimum(chosen, last)[:, 0]
