"""Greedy and temperature sampling, row by row independent."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.sampling.random import Purpose, uniform


@dataclass(frozen=True)
class Draw:
    """How one row's token is chosen. temperature: 0 is greedy; seed, position: the counter of its random number."""

    temperature: float
    seed: int
    position: int


def sample(logits: Tensor, draws: Sequence[Draw]) -> list[int]:
    """Choose one token a row, as `choose`, and bring the ids to the host."""
    tokens: list[int] = choose(logits, draws).tolist()
    return tokens


def choose(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Choose one token a row, without waiting for the device.

    logits: [rows, vocab], any float dtype; a token at -inf is never chosen.
    Returns int64 [rows] on the logits' device: the most probable token where the temperature is 0, else a draw from
    softmax(logits / temperature).
    """
    tokens = torch.argmax(logits, dim=-1)
    rows = [row for row, draw in enumerate(draws) if draw.temperature > 0]
    if rows:
        tokens[rows] = _inverse_cdf(logits[rows], [draws[row] for row in rows])
    return tokens


def _inverse_cdf(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Take the first token whose cumulative probability exceeds the row's uniform number, in FP64."""
    temperature = torch.tensor([draw.temperature for draw in draws], dtype=torch.float64, device=logits.device)
    number = [uniform(draw.seed, draw.position, Purpose.SAMPLE) for draw in draws]
    shifted = logits.double() - logits.double().amax(dim=-1, keepdim=True)  # before the division: no overflow
    mass = torch.softmax(shifted / temperature[:, None], dim=-1).cumsum(dim=-1)
    total = mass[:, -1:].contiguous()
    target = torch.tensor(number, dtype=torch.float64, device=logits.device)[:, None] * total
    chosen = torch.searchsorted(mass, target, right=True)
    last = torch.searchsorted(mass, total)  # the last token with any mass: rounding may lift a target to the total
    return torch.minimum(chosen, last)[:, 0]
