"""Log-probabilities: what the model itself gives, at temperature 1, before biases, penalties, masks and cut-offs."""

from collections.abc import Sequence

import torch
from torch import Tensor

from deepinfer.core.sampled import Logprobs
from deepinfer.sampling.weights import SCALE, whole_weights


def log_probabilities(logits: Tensor, tokens: Tensor, tops: Sequence[int], at_once: int) -> Logprobs:
    """The log-probabilities of `tokens` int64 [R] and of the `tops` (one number a row) most probable ones.

    logits: FP32 [R, vocab], -inf for tokens that can never come. at_once: rows worked on together.
    """
    most = min(max(tops, default=0), logits.shape[-1])
    parts = [
        _part(logits[start : start + at_once], tokens[start : start + at_once], most)
        for start in range(0, max(1, len(tokens)), at_once)
    ]
    chosen, top, ids = (torch.cat(column) for column in zip(*parts, strict=True))
    return Logprobs(tuple(tops), chosen, top, ids)


def _part(logits: Tensor, tokens: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    shifted = logits - logits.amax(-1, keepdim=True)
    # The weights are whole numbers, so their sum does not depend on the order of summation.
    norm = torch.log(whole_weights(shifted).sum(-1, keepdim=True).double() / SCALE)
    chosen = shifted.gather(-1, tokens[:, None]).double() - norm
    ids = _largest(shifted, most)
    return chosen.squeeze(-1), shifted.gather(-1, ids).double() - norm, ids


def _largest(values: Tensor, count: int) -> Tensor:
    """int64 [R, count]: the places of the largest of `values` FP32 [R, V] <= 0, of equal ones the first.

    The bits of a number's magnitude with the place behind them make keys of which no two are equal.
    """
    keys = values.view(torch.int32).bitwise_and(0x7FFFFFFF).long() << 32
    keys += torch.arange(values.shape[-1], device=values.device)
    return keys.topk(count, largest=False).values & 0xFFFFFFFF
