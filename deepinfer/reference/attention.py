"""Compressed sparse attention (CSA2): a sliding window, selected compressed positions and a sink."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from deepinfer.config.model import ModelConfig
from deepinfer.reference.compressor import Compressor, visible_count
from deepinfer.reference.indexer import Indexer, Selection, Ties, candidate_positions, select
from deepinfer.reference.norm import Linear, RMSNorm
from deepinfer.reference.rotary import frequencies, rotate
from deepinfer.reference.rounding import latent_nvfp4, window_fp8


@dataclass(frozen=True)
class Rows:
    """The rows a layer computes: consecutive positions of every sequence of the batch."""

    first: int
    positions: Tensor  # int64 [R], from ``first`` on
    is_image: Tensor  # bool [B, R]
    cut: Tensor | None = None  # int64 [B]: rows at or after it see no window key before it (bounded replay)

    def after(self, start: int, cut: Tensor) -> "Rows":
        """The rows from position ``start`` on, with windows cut at ``cut`` [B]."""
        skip = start - self.first
        return Rows(start, self.positions[skip:], self.is_image[:, skip:], cut)


@dataclass
class SharedKV:
    """What a KV-source layer leaves for the layers after it, and the newest selection over it."""

    latents: Tensor  # [B, S, head_dim]: compressed KV after rotation and rounding
    keys: Tensor  # [B, S, index_head_dim]: index keys after rotation and rounding
    ratio: int
    selection: Selection | None = None


def attend(q: Tensor, keys: Tensor, mask: Tensor, sink: Tensor) -> Tensor:
    """Softmax attention with K = V shared by all heads and a sink that adds to the denominator only.

    ``q`` [B, R, heads, D], ``keys`` [B, R, K, D] and ``mask`` bool [B, R, K] per row, ``sink`` [heads]
    -> [B, R, heads, D] in the dtype of ``q``. A row without keys gives zeros.
    """
    scores = torch.einsum("brhd,brkd->brhk", q, keys).float() * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~mask[:, :, None], -torch.inf)
    sinks = sink.float()[:, None].expand(*scores.shape[:-1], 1)
    weights = torch.cat((scores, sinks), dim=-1).softmax(-1)[..., :-1]
    return torch.einsum("brhk,brkd->brhd", weights.to(q.dtype), keys)


def window_keys(kv: Tensor, rows: Rows, window: int) -> tuple[Tensor, Tensor]:
    """Each row's last ``window`` keys, its own included: kv [B, R, D] -> ([B, R, window, D], bool [B, R, window])."""
    keys = nn.functional.pad(kv, (0, 0, window - 1, 0)).unfold(1, window, 1).transpose(2, 3)
    at = rows.positions[:, None] + torch.arange(1 - window, 1, device=kv.device)
    mask = (at >= rows.first).expand(kv.shape[0], -1, -1)
    if rows.cut is not None:
        cut = rows.cut[:, None, None]
        mask = mask & ((at >= cut) | (rows.positions[:, None] < cut))
    return keys, mask


def selected_keys(latents: Tensor, selected: Tensor) -> tuple[Tensor, Tensor]:
    """Gather: latents [B, S, D] and selected [B, R, K] -> ([B, R, K, D], bool [B, R, K])."""
    batch = torch.arange(latents.shape[0], device=latents.device)[:, None, None]
    return latents[batch, selected.clamp(min=0)], selected >= 0


def sparse_attention(q: Tensor, kv: Tensor, shared: SharedKV | None, rows: Rows, sink: Tensor, window: int) -> Tensor:
    """Attention over the window of each row and, in compressed layers, its selected latents.

    ``q`` [B, R, heads, D], ``kv`` [B, R, D], both rotated, kv rounded -> [B, R, heads, D], not yet rotated back.
    """
    keys, mask = window_keys(kv, rows, window)
    if shared is not None and shared.selection is not None and shared.latents.shape[1] > 0:
        far, far_mask = selected_keys(shared.latents, shared.selection.selected)
        keys, mask = torch.cat((keys, far), dim=2), torch.cat((mask, far_mask), dim=2)
    return attend(q, keys, mask, sink)


class Attention(nn.Module):
    """The attention of one layer or draft stage; ``ratio`` 0 has a window only."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        hidden, heads, dim = config.hidden_size, config.num_attention_heads, config.head_dim
        self.ratio, self.heads, self.dim, self.groups = config.ratio(layer), heads, dim, config.o_groups
        self.window, self.topk = config.sliding_window, config.index_topk
        self.wq_a = Linear(hidden, config.q_lora_rank)
        self.q_norm = RMSNorm(config.q_lora_rank, config.rms_norm_eps)
        self.wq_b = Linear(config.q_lora_rank, heads * dim)
        self.wkv = Linear(hidden, dim)
        self.kv_norm = RMSNorm(dim, config.rms_norm_eps)
        self.wo_a = Linear(heads * dim // self.groups, self.groups * config.o_lora_rank)
        self.wo_b = Linear(self.groups * config.o_lora_rank, hidden)
        self.attn_sink = nn.Parameter(torch.zeros(heads))
        if layer in config.kv_source_layer_ids:
            self.compressor = Compressor(config, self.ratio)
        if layer in config.index_source_layer_ids:
            self.indexer = Indexer(config, owns_keys=layer in config.kv_source_layer_ids)
        publishes = config.candidates_enabled and layer == config.candidate_source_layer_id
        self.ties = Ties.LOWEST
        self.candidates = (config.candidate_block_size, config.candidate_topk_blocks) if publishes else None
        self.register_buffer("freqs", frequencies(config, compressed=self.ratio > 0), persistent=False)
        self.freqs: Tensor

    def compress(self, h: Tensor) -> SharedKV:
        """Compressed KV and index keys of all rows ``h`` [B, T, H] from position 0; KV-source layers only."""
        latent = self.compressor(h)
        positions = torch.arange(latent.shape[1], device=h.device) * self.ratio
        keys = self.indexer.keys(latent, positions, self.freqs)
        return SharedKV(latent_nvfp4(rotate(latent, positions, self.freqs)), keys, self.ratio)

    def select(self, h: Tensor, q_latent: Tensor, shared: SharedKV, rows: Rows) -> Selection:
        """A fresh selection for rows ``h``; also fresh candidates where this layer publishes them."""
        scores = self.indexer.scores(h, q_latent, shared.keys, rows.positions, self.freqs)
        allowed = self.allowed(shared, rows)
        candidates = shared.selection.candidates if shared.selection is not None else None
        if candidates is not None:
            return Selection(select(scores, allowed & candidates, self.topk, self.ties), candidates)
        if self.candidates is not None:
            candidates = candidate_positions(scores, allowed, *self.candidates, self.ties)
        return Selection(select(scores, allowed, self.topk, self.ties), candidates)

    def allowed(self, shared: SharedKV, rows: Rows) -> Tensor:
        """Which compressed positions each row may see: bool [B, R, S]."""
        at = torch.arange(shared.latents.shape[1], device=rows.positions.device)
        visible = at < visible_count(rows.positions, self.ratio)[:, None]
        return visible.expand(shared.latents.shape[0], -1, -1)

    def queries(self, h: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rows [B, R, H] at ``positions`` [R] or [B, R] -> (query latents [B, R, q_lora_rank], queries).

        The queries [B, R, heads, head_dim] are rotated.
        """
        latent = self.q_norm(self.wq_a(h))
        q = self.wq_b(latent).unflatten(-1, (self.heads, self.dim))
        return latent, rotate(q, positions[..., None], self.freqs)

    def keys_values(self, h: Tensor, positions: Tensor) -> Tensor:
        """Rows [..., R, H] at ``positions`` [R] -> window KV [..., R, head_dim], rotated and rounded."""
        return window_fp8(rotate(self.kv_norm(self.wkv(h)), positions, self.freqs))

    def output(self, o: Tensor, positions: Tensor) -> Tensor:
        """Rotate [B, R, heads, head_dim] back by the query's position and project, group by group, to [B, R, H]."""
        o = rotate(o, positions[..., None], self.freqs, inverse=True)
        grouped = o.flatten(-2).unflatten(-1, (self.groups, -1))
        weight = self.wo_a.weight.to(o.dtype).unflatten(0, (self.groups, -1))
        return self.wo_b(torch.einsum("brgd,gcd->brgc", grouped, weight).flatten(-2))

    def forward(self, h: Tensor, rows: Rows, shared: SharedKV | None) -> Tensor:
        """Normed rows [B, R, H] -> [B, R, H]; index-source layers renew the selection in ``shared``."""
        latent, q = self.queries(h, rows.positions)
        kv = self.keys_values(h, rows.positions)
        if hasattr(self, "indexer") and shared is not None:
            shared.selection = self.select(h, latent, shared, rows)
        o = sparse_attention(q, kv, shared, rows, self.attn_sink, self.window)
        return self.output(o, rows.positions)
