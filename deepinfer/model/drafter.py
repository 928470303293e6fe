"""The drafter (DSpark) over caches: context keys of what the target has read, and blocks of rows that follow it.

A block is drafted after an anchor, the newest token, which the target has yet to read. Its rows see the keys of the
window before the anchor, which each stage makes from the target's features, and each other. The rows' own keys live
for one pass only. What is drafted from the rows, token by token, is the business of `deepinfer.speculative`.

Letters: A anchors, G rows of a block, H hidden size, D head dim, r Markov rank.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from deepinfer.cache.storage import Caches
from deepinfer.config.model import ModelConfig
from deepinfer.core.batch import Half
from deepinfer.model.attention import attention_inputs, attention_output
from deepinfer.model.experts import mixture
from deepinfer.model.streams import enter_streams, site_input, site_mix
from deepinfer.model.weights import DraftWeights, LayerWeights, ModelWeights
from deepinfer.model.window import ring_rows
from deepinfer.ops.cache_rows import load_rows, store_rows
from deepinfer.ops.hyper_connections import collapse, expand
from deepinfer.ops.kv_formats import pack_window, unpack_window
from deepinfer.ops.linear import linear, wide_linear
from deepinfer.ops.norm import rms_norm
from deepinfer.ops.rope import frequencies, rotate, rotations
from deepinfer.ops.sparse_attention import sparse_attention


@dataclass(frozen=True)
class Anchors:
    """Newest tokens that blocks are drafted after: int64 [A] each.

    positions: theirs. slots: of their requests. floors: no context key lies before this position.
    """

    ids: Tensor
    positions: Tensor
    slots: Tensor
    floors: Tensor


@dataclass(frozen=True)
class Block:
    """The parallel part of a draft.

    hidden: [A, G, H], what confidence is read from. base_logits: FP32 [A, G, vocab], without the Markov bias.
    """

    hidden: Tensor
    base_logits: Tensor


class Drafter:
    """Weights and constants; all state lies in the caches it is given."""

    def __init__(self, config: ModelConfig, weights: DraftWeights, target: ModelWeights) -> None:
        self._config, self._weights, self._target = config, weights, target
        self.block_size = config.dspark_block_size
        self.device = target.embed.device
        self._freqs = frequencies(config.qk_rope_head_dim, config.rope_theta).to(self.device)
        self._before = torch.arange(-config.sliding_window, 0, device=self.device)
        self._inside = torch.arange(self.block_size, device=self.device)

    def remember(self, features: Tensor, half: Half, caches: Caches) -> None:
        """Keep context keys of rows that the target's decoder half has just run.

        features: FP32 [M, F] of all its rows. Rows that are taken back later do no harm: their keys lie at or behind
        the next anchor, where no block looks before the rows that take their place have been kept.
        """
        config, weights = self._config, self._weights
        rows, places = ring_rows(half, caches.ring)
        read = features[rows].to(self._target.embed.dtype)
        context = rms_norm(linear(read, weights.main_proj), weights.main_norm, config.rms_norm_eps)
        made = linear(context, weights.wkv).chunk(config.draft_stages, dim=-1)
        turns = rotations(half.positions[rows], self._freqs)
        for ring, stage, kv in zip(caches.drafts, weights.stages, made, strict=True):
            keys = rms_norm(kv, stage.attention.kv_norm, config.rms_norm_eps)
            store_rows(ring.flatten(0, 1), places, pack_window(rotate(keys, turns)))

    def block(self, anchors: Anchors, caches: Caches) -> Block:
        """Run the rows of one block for each anchor."""
        config, weights = self._config, self._weights
        seen = _Seen(self._before, anchors, caches.ring, self.block_size)
        positions = (anchors.positions[:, None] + self._inside).flatten()
        turns = rotations(positions, self._freqs)[:, None]
        ids = torch.full_like(positions, config.dspark_noise_token_id)
        ids[:: self.block_size] = anchors.ids
        x, p = enter_streams(self._target.embed[ids], config)
        for ring, stage in zip(caches.drafts, weights.stages, strict=True):
            x, p = self._stage(x, p, stage, turns, load_rows(ring.flatten(0, 1), seen.addresses, seen.exists), seen)
        hidden = collapse(x, p)
        logits = wide_linear(rms_norm(hidden, weights.norm, config.rms_norm_eps), self._target.head)
        return Block(*(rows.view(len(anchors.ids), self.block_size, -1) for rows in (hidden, logits)))

    def bias(self, previous: Tensor) -> Tensor:
        """What the token before adds to the logits: ids int64 [...] -> FP32 [..., vocab]."""
        return wide_linear(self._weights.markov_embed[previous], self._weights.markov_head)

    def confidence(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """Logits of acceptance, given that all drafts before were accepted.

        hidden [A, G, H] of a block and int64 [A, G], the token before each draft -> FP32 [A, G].
        """
        read = torch.cat((hidden.float(), self._weights.markov_embed[previous]), dim=-1)
        return functional.linear(read, self._weights.confidence)

    def _stage(
        self, x: Tensor, p: Tensor, stage: LayerWeights, turns: Tensor, stored: Tensor, seen: "_Seen"
    ) -> tuple[Tensor, Tensor]:
        """One stage over streams [A * G, S, H]; `stored` are the context keys' bytes [A, window, row]."""
        config = self._config
        mix = site_mix(x, stage.attention_site, config)
        h = site_input(x, p, stage.attention_site, config)
        _, q, kv = attention_inputs(h, stage.attention, config)
        own = pack_window(rotate(kv, turns[:, 0])).view(len(stored), self.block_size, -1)
        keys = unpack_window(torch.cat((stored, own), dim=1), h.dtype)
        # All rows of a block see the same keys, so they count as further heads of one row.
        heads = rotate(q, turns).view(len(stored), 1, -1, config.head_dim)
        o = sparse_attention(heads, keys, seen.count, None, None, stage.attention.sink.repeat(self.block_size))
        x = expand(attention_output(rotate(o.view_as(q), turns.conj()), stage.attention), x, mix)
        after = site_mix(x, stage.expert_site, config)
        h = site_input(x, mix.pre, stage.expert_site, config)
        y = mixture(h, None, config.dspark_num_experts_per_tok, stage.experts, config)
        return expand(y, x, after), after.pre


class _Seen:
    """Which context keys blocks see, the same in all stages.

    addresses: int64 [A, window], of the positions before each anchor. exists: bool, which of them hold a key.
    count: int64 [A, 1], how many keys a block sees, its own included.
    """

    def __init__(self, before: Tensor, anchors: Anchors, ring: int, block: int) -> None:
        positions = anchors.positions[:, None] + before
        self.addresses = anchors.slots[:, None] * ring + positions.remainder(ring)
        self.exists = positions >= anchors.floors[:, None]
        self.count = self.exists.sum(1, keepdim=True) + block
