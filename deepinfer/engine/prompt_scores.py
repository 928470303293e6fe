"""Log-probabilities of prompt tokens: which rows of a step come before one, and what they say of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deepinfer.core.plan import Span
from deepinfer.core.request import Request
from deepinfer.core.sampled import Logprobs, PromptLogprobs
from deepinfer.sampling.sampler import Sampler

_ROWS_AT_ONCE = 64
"""Logits of that many prompt rows exist at a time: those of a whole chunk could take gigabytes."""


@dataclass(frozen=True)
class ScoredSpan:
    """The first `count` rows of the plan's span number `span` come before prompt tokens, `targets`."""

    span: int
    request_id: int
    first: int
    targets: tuple[int, ...]
    top: int


def scored_spans(spans: Sequence[Span], requests: Mapping[int, Request]) -> list[ScoredSpan]:
    """Find the rows before prompt tokens whose log-probabilities are asked for."""
    found = []
    for number, span in enumerate(spans):
        request = requests[span.request_id]
        top = request.params.prompt_logprobs
        if top is not None and span.first + 1 < len(request.token_ids):
            targets = request.token_ids[span.first + 1 : span.end + 1]
            found.append(ScoredSpan(number, span.request_id, span.first + 1, targets, top))
    return found


def scored_rows(scored: Sequence[ScoredSpan], decoder_starts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Their places in the decoder half, which runs all rows of such spans."""
    return np.concatenate([decoder_starts[one.span] + np.arange(len(one.targets)) for one in scored])


def prompt_logprobs(
    scored: Sequence[ScoredSpan], hidden: Tensor, head: Callable[[Tensor], Tensor], sampler: Sampler
) -> tuple[PromptLogprobs, ...]:
    """From the rows' final hidden states [P, H]; `head` gives their logits."""
    found, start = [], 0
    for one in scored:
        parts = []
        for begin in range(0, len(one.targets), _ROWS_AT_ONCE):
            targets = torch.tensor(one.targets[begin : begin + _ROWS_AT_ONCE], device=hidden.device)
            rows = hidden[start + begin : start + begin + len(targets)]
            parts.append(sampler.logprobs(head(rows), targets, [one.top] * len(targets)))
        found.append(PromptLogprobs(one.request_id, one.first, _joined(parts)))
        start += len(one.targets)
    return tuple(found)


def _joined(parts: Sequence[Logprobs]) -> Logprobs:
    return Logprobs(
        tuple(top for part in parts for top in part.tops),
        torch.cat([part.chosen for part in parts]),
        torch.cat([part.top for part in parts]),
        torch.cat([part.ids for part in parts]),
    )
