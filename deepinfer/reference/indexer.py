"""The indexer: which compressed positions a query attends to, with hierarchical candidates."""

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor, nn

from deepinfer.config.model import ModelConfig
from deepinfer.reference.norm import Linear, RMSNorm
from deepinfer.reference.rotary import rotate
from deepinfer.reference.rounding import index_mxfp4


def index_scores(q: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    """``sum_heads relu(q . k) * w``: q [B, R, Hi, Di], keys [B, S, Di], weights [B, R, Hi] -> FP32 [B, R, S].

    Product and weighted term are rounded to the model dtype, the sum over heads is FP32.
    """
    terms = torch.einsum("brhd,bsd->brhs", q, keys).relu() * weights[..., None]
    return terms.float().sum(2)


class Ties(Enum):
    """Which of equal scores wins. Scores that are exactly 0 are common: every head's ReLU can be closed."""

    LOWEST = "lowest"  # the lowest position, whatever else is in the batch
    TOPK = "topk"  # as `torch.topk` leaves it, which depends on the length of the row: for comparison with an oracle


def best(scores: Tensor, count: int, ties: Ties) -> tuple[Tensor, Tensor]:
    """Values and indices [..., min(count, S)] of the largest of ``scores`` [..., S]."""
    count = min(count, scores.shape[-1])
    if ties is Ties.TOPK:
        values, indices = scores.topk(count, dim=-1)
        return values, indices
    values, indices = scores.sort(dim=-1, descending=True, stable=True)
    return values[..., :count], indices[..., :count]


def select(scores: Tensor, allowed: Tensor, count: int, ties: Ties) -> Tensor:
    """The ``count`` best allowed positions of each row, as a set: FP32 and bool [B, R, S] -> int64 [B, R, K], -1: none.

    K is min(count, S).
    """
    values, indices = best(scores.masked_fill(~allowed, -torch.inf), count, ties)
    return torch.where(values > -torch.inf, indices, -1)


def candidate_positions(scores: Tensor, allowed: Tensor, block: int, count: int, ties: Ties) -> Tensor:
    """Positions in each row's best blocks: FP32 and bool [B, R, S] -> bool [B, R, S].

    A block's score is its largest allowed score; the block with the newest allowed position always counts, within
    the budget of ``count`` blocks.
    """
    size = scores.shape[-1]
    if size == 0:
        return allowed
    masked = scores.masked_fill(~allowed, -torch.inf)
    masked = nn.functional.pad(masked, (0, -size % block), value=-torch.inf)
    blocks = masked.unflatten(-1, (-1, block)).amax(-1)
    newest = (allowed.sum(-1, keepdim=True) - 1).clamp(min=0) // block
    blocks = blocks.scatter(-1, newest, torch.inf)
    kept = torch.zeros_like(blocks, dtype=torch.bool).scatter(-1, best(blocks, count, ties)[1], True)
    return kept.repeat_interleave(block, dim=-1)[..., :size] & allowed


@dataclass
class Selection:
    """What an index layer leaves for the layers after it."""

    selected: Tensor  # int64 [B, R, K], compressed positions, -1: none
    candidates: Tensor | None = None  # bool [B, R, S]: where later index layers may look; None: everywhere


class Indexer(nn.Module):
    """Scores of one index-source layer; layers that own compressed KV also make the index keys."""

    def __init__(self, config: ModelConfig, owns_keys: bool) -> None:
        super().__init__()
        self.heads, self.dim = config.index_n_heads, config.index_head_dim
        self.wq_b = Linear(config.q_lora_rank, self.heads * self.dim)
        self.weights_proj = Linear(config.hidden_size, self.heads)
        if owns_keys:
            self.wk = Linear(config.head_dim, self.dim)
            self.k_norm = RMSNorm(self.dim, config.rms_norm_eps)

    def keys(self, latent: Tensor, positions: Tensor, freqs: Tensor) -> Tensor:
        """Index keys [B, S, Di] of latents [B, S, head_dim] at token ``positions`` [S]."""
        return index_mxfp4(rotate(self.k_norm(self.wk(latent)), positions, freqs))

    def scores(self, h: Tensor, q_latent: Tensor, keys: Tensor, positions: Tensor, freqs: Tensor) -> Tensor:
        """FP32 scores [B, R, S] of rows ``h`` [B, R, H] with query latents [B, R, q_lora_rank] at ``positions`` [R]."""
        q = self.wq_b(q_latent).unflatten(-1, (self.heads, self.dim))
        q = index_mxfp4(rotate(q, positions[:, None], freqs))
        weights = self.weights_proj(h) * (self.dim**-0.5 * self.heads**-0.5)
        return index_scores(q, keys, weights)
