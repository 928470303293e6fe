"""Compressed sparse attention (CSA2) over caches: a window, selected compressed entries and a sink."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from deepinfer.cache.storage import Caches
from deepinfer.checkpoint.formats import index_mxfp4
from deepinfer.config.model import ModelConfig
from deepinfer.core.batch import Half
from deepinfer.model.reading import LiveEntries
from deepinfer.model.selection import Query, Selection, Selector
from deepinfer.model.weights import AttentionWeights, IndexerWeights
from deepinfer.model.window import WindowPlan, extend
from deepinfer.ops.linear import grouped_linear, linear
from deepinfer.ops.norm import rms_norm
from deepinfer.ops.rope import rotate
from deepinfer.ops.sparse_attention import sparse_attention


@dataclass
class Reach:
    """What the rows of one half reach, and what its layers leave for later layers of the half.

    windows: where their windows lie. plain, compressed: complex64 [M, F], rotations of window-only and compressed
    layers. entries: the compressed KV of the newest source. selections: over it, one a group; empty before the first.
    """

    half: Half
    windows: WindowPlan
    plain: Tensor
    compressed: Tensor
    entries: LiveEntries | None = None
    selections: list[Selection] = field(default_factory=list)

    def enter_source(self, entries: LiveEntries) -> None:
        """From here on layers read the compressed KV of another source."""
        self.entries, self.selections = entries, []


class Attention:
    """The attention of one layer; window-only where its ratio is 0."""

    def __init__(self, config: ModelConfig, layer: int, weights: AttentionWeights) -> None:
        self._config, self._layer, self._weights = config, layer, weights
        self._compressed = config.ratio(layer) > 0
        self._selector = Selector(config, layer)

    def __call__(self, h: Tensor, reach: Reach, caches: Caches) -> Tensor:
        """Normed rows [M, H] of the half -> [M, H]. Extends the layer's windows; index layers renew the selections."""
        config, weights = self._config, self._weights
        turns = reach.compressed if self._compressed else reach.plain
        latent, q, kv = attention_inputs(h, weights, config)
        near = extend(caches.windows[self._layer], rotate(kv, turns), reach.half, reach.windows)
        if weights.indexer is not None:
            self._select(h, latent, weights.indexer, reach)
        o = self._attend(rotate(q, turns[:, None]), near, reach)
        return attention_output(rotate(o, turns[:, None].conj()), weights)

    def _select(self, h: Tensor, latent: Tensor, weights: IndexerWeights, reach: Reach) -> None:
        config, entries = self._config, reach.entries
        assert entries is not None, "an index source reads the compressed KV of a source at or before it"
        q = linear(latent, weights.wq_b).view(len(h), config.index_n_heads, config.index_head_dim)
        q = index_mxfp4(rotate(q, reach.compressed[:, None]))
        scale = config.index_head_dim**-0.5 * config.index_n_heads**-0.5
        head_weights = linear(h, weights.weights_proj) * scale
        before: list[Selection | None] = [*reach.selections] or [None] * len(reach.half.groups)
        reach.selections = [
            self._selector.select(
                Query(group.view(q), group.view(head_weights), group.view(reach.half.positions)), group, entries, last
            )
            for group, last in zip(reach.half.groups, before, strict=True)
        ]

    def _attend(self, q: Tensor, near: list[Tensor], reach: Reach) -> Tensor:
        """q [M, h, D] -> [M, h, D], group by group."""
        results = []
        for index, group in enumerate(reach.half.groups):
            far, chosen = None, None
            if self._compressed:
                selection = reach.selections[index]
                far, chosen = selection.far, selection.chosen
            seen = reach.windows.seen[index]
            result = sparse_attention(group.view(q), near[index], seen, far, chosen, self._weights.sink)
            results.append(result.flatten(0, 1))
        return torch.cat(results) if results else q


def attention_inputs(h: Tensor, weights: AttentionWeights, config: ModelConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Normed rows [M, H] -> query latents [M, q_lora_rank], queries [M, h, D] and window KV [M, D], not yet rotated."""
    made = linear(h, weights.inputs)
    latent = rms_norm(made[:, : config.q_lora_rank], weights.q_norm, config.rms_norm_eps)
    kv = rms_norm(made[:, config.q_lora_rank :], weights.kv_norm, config.rms_norm_eps)
    q = linear(latent, weights.wq_b).view(len(h), config.num_attention_heads, config.head_dim)
    return latent, q, kv


def attention_output(o: Tensor, weights: AttentionWeights) -> Tensor:
    """Project [M, h, D], rotated back, head group by head group, then together: [M, H]."""
    grouped = o.reshape(len(o), len(weights.wo_a), -1)
    return linear(grouped_linear(grouped, weights.wo_a).flatten(1), weights.wo_b)
