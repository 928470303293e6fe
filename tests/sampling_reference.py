"""What the sampler should do, in plain NumPy, one row at a time, with a sorted vocabulary and FP64."""

from collections.abc import Collection, Sequence

import numpy as np

from deepinfer.core.sampling_params import SamplingParams

LAST_RESORT = -1e30
"""Of an end that comes too early: it is taken where a grammar allows nothing else."""


def adjusted(
    logits: np.ndarray,
    params: SamplingParams,
    prompt: Sequence[int] = (),
    generated: Sequence[int] = (),
    ends: Collection[int] = (),
    allowed: Collection[int] | None = None,
) -> np.ndarray:
    """Logits of a row before the temperature; `ends` are its stop tokens, `allowed` what a grammar admits."""
    logits = logits.astype(np.float64).copy()
    for token, value in (params.logit_bias or {}).items():
        logits[token] += value
    for token in {*prompt, *generated}:
        positive = logits[token] > 0
        logits[token] *= 1 / params.repetition_penalty if positive else params.repetition_penalty
    for token in generated:
        logits[token] -= params.frequency_penalty
    for token in set(generated):
        logits[token] -= params.presence_penalty
    if len(generated) < params.min_tokens:
        logits[list(ends)] = LAST_RESORT
    if allowed is not None:
        logits[[token for token in range(len(logits)) if token not in allowed]] = -np.inf
    return logits


def distribution(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Probabilities of a row's tokens, from `adjusted` logits; the temperature must be above 0."""
    scaled = (logits - logits.max()) / params.temperature
    weights = np.exp(scaled)
    order = np.argsort(-scaled, kind="stable")
    if params.top_k:
        least = scaled[order[min(params.top_k, len(order)) - 1]]
        weights[scaled < least] = 0
    if params.top_p < 1:
        shares = weights[order].cumsum() / weights.sum()
        place = np.flatnonzero(shares >= params.top_p * shares[-1])[0]
        weights[scaled < scaled[order[place]]] = 0
    weights[weights < params.min_p * weights.max()] = 0
    return weights / weights.sum()
