"""The PyTorch version: defines the operators, on any device."""

import torch
from torch import Tensor
from torch.nn import functional

_LOW_BITS = 0xFFFFFFFF


def index_scores(q: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    """q [G, n, h, d], keys [G, S, d], weights [G, n, h] -> FP32 [G, n, S]."""
    products = torch.matmul(q.flatten(1, 2), keys.transpose(1, 2)).view(*q.shape[:3], keys.shape[1])
    return _weighted(products, weights)


def row_scores(q: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    """q [G, n, h, d], keys [G, n, S, d], weights [G, n, h] -> FP32 [G, n, S]."""
    return _weighted(torch.matmul(q, keys.transpose(2, 3)), weights)


def _weighted(products: Tensor, weights: Tensor) -> Tensor:
    return (products.relu_() * weights[..., None]).sum(2, dtype=torch.float32)


def best_positions(scores: Tensor, count: int) -> Tensor:
    """scores FP32 [..., S] -> int64 [..., min(count, S)]; -1 where only -inf is left."""
    found = largest(scores, count)
    return found.masked_fill(scores.gather(-1, found) == -torch.inf, -1)


def best_blocks(scores: Tensor, visible: Tensor, block: int, count: int) -> Tensor:
    """scores FP32 [..., S], visible int64 [...] -> int64 [..., min(count, ceil(S / block))], ascending."""
    padded = functional.pad(scores, (0, -scores.shape[-1] % block), value=-torch.inf)
    blocks = padded.view(*scores.shape[:-1], -1, block).amax(-1)
    newest = ((visible - 1).clamp(min=0) // block)[..., None]
    return best_positions(blocks.scatter(-1, newest, torch.inf), count).sort(-1).values


def block_positions(blocks: Tensor, block: int) -> Tensor:
    """blocks int64 [..., B] -> int64 [..., B * block]; -1 for the positions of no block."""
    inside = torch.arange(block, device=blocks.device)
    return torch.where(blocks[..., None] < 0, -1, blocks[..., None] * block + inside).flatten(-2)


def largest(scores: Tensor, count: int) -> Tensor:
    """Positions int64 [..., min(count, S)] of the largest scores, the best first, of equal ones the lower position.

    A key holds the score's bits, made to sort as integers do, above the inverted position: no two keys are equal, so
    every way of finding the largest finds the same. Adding 0 makes the two zeros equal.
    """
    bits = (scores + 0.0).view(torch.int32)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64) << 32
    inverted = _LOW_BITS - torch.arange(scores.shape[-1], device=scores.device)
    return (ordered | inverted).topk(min(count, scores.shape[-1]), dim=-1).indices
