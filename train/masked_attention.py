"""Sparse attention as dense attention under a mask, and the indexer's lesson from the attention mass.

A training step needs every score anyway, since the indexer learns from the attention mass.
"""

from typing import Any

import torch
from torch import Tensor, nn

from deepinfer.reference import indexer
from deepinfer.reference.attention import Attention, Rows, SharedKV
from deepinfer.reference.indexer import Indexer
from train.operators import OPS, STATE, IndexRecord


def near_mask(rows: Rows, window: int, batch: int) -> Tensor:
    """Block-wise window mask bool [B or 1, R / W, 1, W, 2W]: key k of a block lies at ``block * W - W + k``."""
    starts = rows.positions.view(-1, window)[:, :1, None]
    at = starts - window + torch.arange(2 * window, device=starts.device)
    query = rows.positions.view(-1, window)[:, :, None]
    mask = ((at <= query) & (at > query - window) & (at >= rows.first))[None]
    if rows.cut is not None:
        cut = rows.cut[:, None, None, None]
        mask = mask & ((at >= cut) | (query < cut))
    return mask[:, :, None]


def masked_attention(q: Tensor, kv: Tensor, shared: SharedKV | None, rows: Rows, sink: Tensor, window: int) -> Tensor:
    """See `attention.sparse_attention`; R must be a multiple of the window."""
    batch, count, heads, dim = q.shape
    blocks = count // window
    q = (q * dim**-0.5).view(batch, blocks, window, heads, dim).transpose(2, 3)
    keys = kv.view(batch, blocks, window, dim)
    keys = torch.cat((nn.functional.pad(keys, (0, 0, 0, 0, 1, 0))[:, :-1], keys), dim=2)
    near = q.flatten(2, 3) @ keys.transpose(2, 3)
    near = near.view(batch, blocks, heads, window, 2 * window)
    mask = near_mask(rows, window, batch)
    if shared is None:
        weights = OPS.softmax(near, None, mask, None, sink)
        out = weights.flatten(2, 3) @ keys
    else:
        record: Any = shared.selection
        far = q.reshape(batch, -1, dim) @ shared.latents.transpose(1, 2)
        far = far.view(batch, blocks, heads, window, -1)
        allowed = record.selected if STATE.sparse else record.allowed
        far_mask = allowed.view(batch, blocks, 1, window, -1)
        weights = OPS.softmax(near, far, mask, far_mask, sink)
        close, distant = weights.split((2 * window, far.shape[-1]), dim=-1)
        mass = distant.detach().sum(2, dtype=torch.float32).view(batch, count, -1)
        record.mass = mass if record.mass is None else record.mass + mass
        out = close.flatten(2, 3) @ keys
        out = out + (distant.reshape(batch, -1, far.shape[-1]) @ shared.latents).view_as(out)
    return out.view(batch, blocks, heads, window, dim).transpose(2, 3).reshape(batch, count, heads, dim)


def top_mask(scores: Tensor, allowed: Tensor, count: int) -> Tensor:
    """The ``count`` best allowed positions as a mask: FP32 and bool [.., S] -> bool [.., S]."""
    masked = scores.masked_fill(~allowed, -torch.inf)
    if count >= scores.shape[-1]:
        return allowed
    chosen = masked.topk(count, dim=-1, sorted=False).indices
    return torch.zeros_like(allowed).scatter_(-1, chosen, True) & allowed


def masked_select(self: Attention, h: Tensor, q_latent: Tensor, shared: SharedKV, rows: Rows) -> IndexRecord:
    """See `Attention.select`; gradients of the index loss stop at the indexer's inputs."""
    scores = self.indexer.scores(h.detach(), q_latent.detach(), shared.keys, rows.positions, self.freqs)
    allowed = self.allowed(shared, rows).contiguous()
    candidates = shared.selection.candidates if shared.selection is not None else None
    selected = allowed
    if STATE.sparse:
        with torch.no_grad():
            searched = allowed if candidates is None else allowed & candidates
            selected = top_mask(scores, searched, self.topk)
            if candidates is None and self.candidates is not None:
                candidates = indexer.candidate_positions(scores, allowed, *self.candidates, indexer.Ties.TOPK)
    record = IndexRecord(selected, candidates, scores=scores, allowed=allowed)
    STATE.records.append(record)
    return record


def detached_keys(self: Indexer, latent: Tensor, positions: Tensor, freqs: Tensor) -> Tensor:
    """See `Indexer.keys`; the latent itself learns from attention only."""
    return OPS.index_mxfp4(OPS.rotate(self.k_norm(self.wk(latent.detach())), positions, freqs, False))


def index_loss() -> Tensor:
    """Mean over index layers of the cross-entropy between attention mass and index scores, in nats."""
    losses = []
    for record in STATE.records:
        assert record.mass is not None
        seen = record.selected if STATE.sparse else record.allowed
        losses.append(OPS.index_loss(record.scores, record.mass, seen))
    return torch.stack(losses).mean()
