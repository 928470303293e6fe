"""The batch-invariant version: scores in one order, chosen positions in the order of the entries.

So the places of a row's entries in its sums do not depend on whether its group had to choose at all.
"""

import torch
from torch import Tensor
from torch.nn import functional

from deepinfer.ops.indexer import torch as plain
from deepinfer.ops.invariance import ordered_sum, product
from deepinfer.ops.invariance.products import COLUMNS


def index_scores(q: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    """q [G, n, h, d], keys [G, S, d], weights [G, n, h] -> FP32 [G, n, S]."""
    live = keys.shape[1]
    padded = functional.pad(keys, (0, 0, 0, -live % COLUMNS[0]))  # before each row gets its view of them
    return row_scores(q, padded[:, None].expand(-1, q.shape[1], -1, -1), weights)[:, :, :live]


def row_scores(q: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    """q [G, n, h, d], keys [G, n, S, d], weights [G, n, h] -> FP32 [G, n, S]."""
    if q.shape[1] == 1:
        products = product(q[:, 0], keys[:, 0].transpose(1, 2))[:, None]
    else:
        products = torch.stack([product(own, other.transpose(1, 2)) for own, other in zip(q, keys, strict=True)])
    return ordered_sum((products.relu_() * weights[..., None]).float(), 2)


def best_positions(scores: Tensor, count: int) -> Tensor:
    """scores FP32 [..., S] -> int64 [..., min(count, S)], ascending; -1 behind them where only -inf is left."""
    found = plain.largest(scores, count)
    behind = scores.shape[-1]
    found = found.masked_fill_(scores.gather(-1, found) == -torch.inf, behind).sort(-1).values
    return found.masked_fill_(found == behind, -1)
