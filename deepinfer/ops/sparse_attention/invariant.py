"""The batch-invariant version: every row by itself, its window from the oldest place on, then its far positions.

Far positions are taken in blocks, whose results are added one after another, so blocks of nothing change nothing.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from deepinfer.ops.invariance import elementwise, ordered_sum, product, row_sums
from deepinfer.ops.sparse_attention.torch import pick

BLOCK = 64
"""Far positions of a block."""

ROWS_CPU, ROWS = 64, 256
"""Rows at a time, as in the PyTorch version."""


def sparse_attention(
    q: Tensor, near: Tensor, seen: Tensor, far: Tensor | None, chosen: Tensor | None, sink: Tensor
) -> Tensor:
    """q [G, n, h, D], near [G, P + n, D], seen [G, n], far [G, F, D], chosen [G, n, K], sink [h] -> [G, n, h, D].

    The -1 of `chosen` lie behind all places.
    """
    rows = q.shape[1]
    windows = near.unfold(1, near.shape[1] - rows + 1, 1)  # [G, n, D, w], without a copy
    if far is None or chosen is None or not chosen.shape[2]:
        far, chosen = None, None
    else:
        chosen = functional.pad(chosen, (0, -chosen.shape[2] % BLOCK), value=-1)
    out = torch.empty_like(q)
    for stretches, block in _turns(q):
        distant = None if far is None else far[stretches]
        picked, missing = None, None
        if distant is not None and chosen is not None:
            places = chosen[stretches, block]
            picked, missing = pick(distant, places).flatten(0, 1), places.flatten(0, 1) < 0
        keys, heads = windows[stretches, block].flatten(0, 1), q[stretches, block]
        made = _attend(heads.flatten(0, 1), keys, seen[stretches, block].flatten(), picked, missing, sink)
        out[stretches, block] = made.view(heads.shape)
    return out


def _turns(q: Tensor) -> Iterator[tuple[slice, slice]]:
    """Stretches and rows of them to take together: their windows must be one stack of matrices in memory."""
    stretches, rows = q.shape[:2]
    step = ROWS_CPU if q.device.type == "cpu" else ROWS
    if rows == 1:
        for first in range(0, stretches, step):
            yield slice(first, first + step), slice(0, 1)
        return
    for stretch in range(stretches):
        for first in range(0, rows, step):
            yield slice(stretch, stretch + 1), slice(first, min(first + step, rows))


def _attend(
    q: Tensor, windows: Tensor, seen: Tensor, picked: Tensor | None, missing: Tensor | None, sink: Tensor
) -> Tensor:
    """q [N, h, D], windows [N, D, w], seen [N], picked [N, K, D] and missing [N, K], or None -> [N, h, D]."""
    unseen = torch.arange(windows.shape[2], 0, -1, device=q.device) > seen[:, None]
    scores = [product(q, windows).float().masked_fill_(unseen[:, None], -torch.inf)]
    if picked is not None and missing is not None:
        scores.append(product(q, picked.transpose(1, 2)).float().masked_fill_(missing[:, None], -torch.inf))
    weights = [part.to(q.dtype) for part in _softmax(scores, sink, q.shape[2] ** -0.5)]
    made = product(weights[0], windows.transpose(1, 2))
    return made if picked is None else made + _blocks(weights[1], picked).to(q.dtype)


def _softmax(scores: list[Tensor], sink: Tensor, scale: float) -> list[Tensor]:
    """Weights of scores FP32 [N, h, w] each, not yet scaled, with `sink` as one more logit."""
    scaled = [part.mul_(scale) for part in scores]
    top = sink[:, None]
    for part in scaled:
        top = torch.maximum(top, part.amax(-1, keepdim=True))
    heights = [elementwise(Tensor.exp, part.sub_(top)) for part in scaled]
    total = elementwise(Tensor.exp, sink[:, None] - top) + row_sums(heights[0])
    for part in heights[1:]:
        total = total + ordered_sum(row_sums(part.view(*part.shape[:-1], -1, BLOCK)), 2)
    return [part.div_(total) for part in heights]


def _blocks(weights: Tensor, values: Tensor) -> Tensor:
    """weights [N, h, K], values [N, K, D] -> FP32 [N, h, D], block after block."""
    starts = range(0, weights.shape[2], BLOCK)
    parts = [product(weights[:, :, s : s + BLOCK], values[:, s : s + BLOCK]).float() for s in starts]
    return ordered_sum(torch.stack(parts), 0)
