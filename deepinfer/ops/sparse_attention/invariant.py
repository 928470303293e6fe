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

FEW = 8
"""Rows of a stretch up to which the windows of several stretches are copied, to be taken together."""


def sparse_attention(
    q: Tensor, near: Tensor, seen: Tensor, far: Tensor | None, chosen: Tensor | None, sink: Tensor
) -> Tensor:
    """q [G, n, h, D], near [G, P + n, D], seen [G, n], far [G, F, D], chosen [G, n, K], sink [h] -> [G, n, h, D].

    The -1 of `chosen` lie behind all places.
    """
    rows = q.shape[1]
    windows = near.unfold(1, near.shape[1] - rows + 1, 1).transpose(2, 3)  # [G, n, w, D], without a copy
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
        rows_seen = seen[stretches, block].flatten()
        made = _attend(heads.flatten(0, 1), keys.transpose(1, 2), rows_seen, picked, missing, sink)
        out[stretches, block] = made.view(heads.shape)
    return out


def _turns(q: Tensor) -> Iterator[tuple[slice, slice]]:
    """Stretches and rows of them to take together; windows of one stretch overlap in memory, of many they do not."""
    stretches, rows = q.shape[:2]
    step = ROWS_CPU if q.device.type == "cpu" else ROWS
    if rows <= FEW:
        for first in range(0, stretches, step // rows):
            yield slice(first, first + step // rows), slice(0, rows)
        return
    for stretch in range(stretches):
        for first in range(0, rows, step):
            yield slice(stretch, stretch + 1), slice(first, min(first + step, rows))


def _attend(
    q: Tensor, windows: Tensor, seen: Tensor, picked: Tensor | None, missing: Tensor | None, sink: Tensor
) -> Tensor:
    """q [N, h, D], windows [N, D, w], seen [N], picked [N, K, D] and missing [N, K], or None -> [N, h, D]."""
    window = windows.shape[2]
    unseen = torch.arange(window, 0, -1, device=q.device) > seen[:, None]
    scores = product(q, windows).float().masked_fill_(unseen[:, None], -torch.inf)
    parts = [functional.pad(scores, (0, -window % BLOCK), value=-torch.inf) if window % BLOCK else scores]
    if picked is not None and missing is not None:
        found = product(q, picked.transpose(1, 2)).float()
        parts.append(found.masked_fill_(missing[:, None], -torch.inf))
    weights = _softmax(torch.cat(parts, -1), sink, q.shape[2] ** -0.5).to(q.dtype)
    made = product(weights[..., :window], windows.transpose(1, 2))
    return made if picked is None else made + _blocks(weights[..., parts[0].shape[2] :], picked).to(q.dtype)


def _softmax(scores: Tensor, sink: Tensor, scale: float) -> Tensor:
    """Weights of scores FP32 [N, h, whole blocks], not yet scaled, with `sink` as one more logit."""
    scaled = scores.mul_(scale)
    top = torch.maximum(scaled.amax(-1, keepdim=True), sink[:, None])
    heights = elementwise(Tensor.exp, scaled.sub_(top))
    blocks = row_sums(heights.view(*heights.shape[:-1], -1, BLOCK))
    return heights.div_(ordered_sum(blocks, 2).add_(elementwise(Tensor.exp, sink[:, None] - top)))


def _blocks(weights: Tensor, values: Tensor) -> Tensor:
    """weights [N, h, K], values [N, K, D] -> FP32 [N, h, D], block after block."""
    blocks = weights.shape[2] // BLOCK
    own = weights.reshape(*weights.shape[:2], blocks, BLOCK).transpose(1, 2).flatten(0, 1)
    parts = product(own, values.view(-1, BLOCK, values.shape[2])).float()
    return ordered_sum(parts.view(len(values), blocks, weights.shape[1], -1), 1)
