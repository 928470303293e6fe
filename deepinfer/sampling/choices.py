"""What the requests of a step's rows ask for, column by column, on the host."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deepinfer.core.request import Request
from deepinfer.sampling.cutoffs import Limits
from deepinfer.sampling.transfer import floats, integers

Floats = npt.NDArray[np.float64]

# Beyond these a temperature makes no difference, and within them no quotient overflows or loses a token's -inf.
_COLDEST, _HOTTEST = 1e-30, 1e30


def usable_temperature(temperature: float) -> float:
    """0, or a temperature that means the same and that logits can be divided by."""
    return temperature and min(max(temperature, _COLDEST), _HOTTEST)


@dataclass(frozen=True)
class Choice:
    """One request's part.

    biased, bias: int64 and FP32 [B], tokens and what is added to their logits; None without logit_bias.
    ends: int64 [E], the tokens that may not come before `free_from`, the position at which the request has its fewest
        tokens; None without min_tokens.
    """

    request: Request
    biased: Tensor | None
    bias: Tensor | None
    ends: Tensor | None
    free_from: int

    @classmethod
    def of(cls, request: Request, eos: int, device: torch.device) -> "Choice":
        """The part of `request`, with its tensors on `device`."""
        params = request.params
        biased = bias = ends = None
        if params.logit_bias:
            biased = integers(list(params.logit_bias), device)
            bias = floats(list(params.logit_bias.values()), device)
        if params.min_tokens:
            ends = integers(sorted({*params.stop_token_ids, *(() if params.ignore_eos else (eos,))}), device)
        return cls(request, biased, bias, ends, len(request.token_ids) + params.min_tokens)

    @property
    def columns(self) -> tuple[float, ...]:
        """What `Choices` reads, in its order."""
        p = self.request.params
        temperature = usable_temperature(p.temperature)
        penalties = (p.repetition_penalty, p.frequency_penalty, p.presence_penalty)
        logprobs = -1 if p.logprobs is None else p.logprobs
        return temperature, p.top_k, p.top_p, p.min_p, *penalties, p.penalises, logprobs


@dataclass(frozen=True)
class Choices:
    """The columns of S rows, FP64 [S] each."""

    temperature: Floats
    top_k: Floats
    top_p: Floats
    min_p: Floats
    repetition: Floats
    frequency: Floats
    presence: Floats
    penalised: Floats
    logprobs: Floats

    @classmethod
    def of(cls, rows: Sequence[tuple[float, ...]]) -> "Choices":
        """From the rows' columns."""
        return cls(*np.array(rows, dtype=np.float64).reshape(len(rows), 9).T)

    def limits(self, rows: npt.NDArray[np.intp]) -> Limits:
        """What some rows draw from."""
        return Limits(self.top_k[rows], self.top_p[rows], self.min_p[rows])
