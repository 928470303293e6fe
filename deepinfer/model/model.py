"""DeepSeek-V4.1-Flash over caches: one step of the rows of many requests.

The encoder half (layers before the last KV source) runs every row; the source then makes compressed KV of them all,
and from its attention on the decoder half runs only the rows that the batch names. The head runs sampled rows only.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from deepinfer.cache.storage import Caches
from deepinfer.config.model import ModelConfig
from deepinfer.core.batch import Batch, Half, SharedHalf
from deepinfer.model.attention import Attention, Reach
from deepinfer.model.compression import Due, compress, due_entries
from deepinfer.model.experts import RoutedExperts, local_experts, mixture
from deepinfer.model.memory import Memory, ReadTables, engram, fetch, look_back
from deepinfer.model.reading import LiveEntries
from deepinfer.model.row_operators import RowOperators
from deepinfer.model.rows import RowAttention, RowReach, reach_rows, reach_shared_rows
from deepinfer.model.streams import enter_streams, site_input, site_mix
from deepinfer.model.weights import ModelWeights, SiteWeights
from deepinfer.model.window import plan_shared_windows, plan_windows
from deepinfer.ops.beside import Lane, beside
from deepinfer.ops.hyper_connections import advance
from deepinfer.ops.linear import wide_linear
from deepinfer.ops.rope import frequencies, rotations
from deepinfer.text.images import TEXT


@dataclass(frozen=True)
class StepOutput:
    """What a step gives.

    logits: FP32 [S, vocab] of the sampled rows. features: FP32 [M, F] of the decoder rows, the mean over streams of
    what enters each drafting target layer, side by side; None unless asked for. scored: [P, H], what the head takes of
    the batch's scored rows; None where it has none.
    """

    logits: Tensor
    features: Tensor | None
    scored: Tensor | None = None


class InferenceModel:
    """The target model: weights and constants; all state lies in the caches it is given.

    recordable: whether a step of fixed shape does the same work each time, without a look from the host.
    """

    recordable = True

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        classes: Sequence[int] | None = None,
        operators: RowOperators | None = None,
        experts: Sequence[RoutedExperts] | None = None,
        tables: ReadTables | None = None,
    ) -> None:
        """`classes` maps token ids to Engram's compressed ids; needed where the model has Engram layers.

        operators: attend row by row with them; None: group by group.
        experts: carry out each layer's routed experts; None: they all lie in `weights`.
        tables: reads the Engram tables before the layers run; None: each layer reads its own from `weights`.
        """
        self.config, self.weights = config, weights
        self._tables = tables
        self._engrams = weights.engrams
        self.experts: Sequence[RoutedExperts] = experts or [local_experts] * len(weights.layers)
        self.device, self.dtype = weights.embed.device, weights.embed.dtype
        rope, scaling = config.qk_rope_head_dim, config.rope_scaling
        self._plain = frequencies(rope, config.rope_theta).to(self.device)
        self._compressed = frequencies(rope, config.compress_rope_theta, scaling).to(self.device)
        known = torch.tensor(list(classes if classes is not None else range(config.vocab_size)), device=self.device)
        self._pad_class = int(known[config.engram_pad_token_id]) if config.engram_layer_ids else 0
        if config.image_token_id is not None and config.image_token_id < len(known):
            known[config.image_token_id] = -1
        self._classes = known
        self._by_rows = operators is not None
        self._attention: list[_LayerAttention] = [
            Attention(config, n, layer.attention)
            if operators is None
            else RowAttention(config, n, layer.attention, operators)
            for n, layer in enumerate(weights.layers)
        ]

    def step(self, batch: Batch, caches: Caches, features: bool = False) -> StepOutput:
        """Run one step and leave in `caches` what later steps need."""
        config, found, shared = self.config, _Features(features, self.config), batch.shared
        rows = self._enter(batch, caches)
        reach = self._reach(batch.encoder, caches, None if shared is None else shared.encoder)
        due: dict[int, Due] = {}
        for number, layer in enumerate(self.weights.layers):
            if layer.engram is not None and rows.memory is not None:
                rows = rows.enter(
                    engram(rows.x, number, rows.memory, layer.engram, config), layer.attention_site, config
                )
            h = rows.h
            if number in config.kv_source_layer_ids:
                ratio = config.ratio(number)
                if ratio not in due:
                    due[ratio] = due_entries(ratio, self._compressed, batch, caches)
                compress(h, number, layer.attention, due[ratio], batch, caches, config)
            if number == config.decoder_start:
                chosen = batch.decoder_rows
                pick = _indexing(chosen) if shared is None else shared.streams
                rows = rows.of(pick)
                reach = self._reach(batch.decoder, caches, None if shared is None else shared.decoder)
                found.narrow(pick)
                if not len(chosen):
                    self.stand_by_from(number)
                    break
            if number in config.kv_source_layer_ids:
                self._enter_source(reach, number, caches)
            found.add(number, rows.x)
            rows = self._layer(number, rows, reach, caches)
        hidden, joined = rows.h, found.joined(len(batch.decoder_rows), rows.x)
        if shared is not None and shared.decoder is not None:
            hidden, joined = shared.decoder.gather(hidden), None if joined is None else shared.features(joined)
        scored = None if batch.scored_rows is None else hidden[batch.scored_rows]
        return StepOutput(self.head(hidden[batch.sample_rows]), joined, scored)

    def head(self, hidden: Tensor) -> Tensor:
        """FP32 logits [R, vocab] of final hidden states [R, H]."""
        return wide_linear(hidden, self.weights.head)

    def stand_by(self) -> bool:
        """Help other ranks with a step, without own rows; False if they have none, or if nothing is shared."""
        return False

    def stand_by_from(self, layer: int) -> None:
        """Called where no row is left to run `layer` and those behind it."""

    def _enter(self, batch: Batch, caches: Caches) -> "_Rows":
        """The rows' embeddings in every stream, and what Engram looks up with."""
        x, is_image, memory = self.weights.embed[batch.ids], None, None
        if batch.pictures is not None and self.weights.vision is not None:
            types = batch.pictures.types
            is_image = types != TEXT
            x = torch.where(is_image[:, None], self.weights.vision.markers[types.clamp(min=0)], x)
            x[batch.pictures.rows] = batch.pictures.cells
        if self.config.engram_layer_ids:
            whole = batch if batch.shared is None else batch.shared.whole
            memory = look_back(whole, caches.history, self._classes, self._pad_class, self.config)
            if batch.shared is not None:
                memory = memory.of(_indexing(batch.shared.encoder.own))
            if self._tables is not None:
                memory = fetch(memory, self._engrams, self._tables, self.config)
        x, p = enter_streams(x, self.config)
        h = site_input(x, p, self.weights.layers[0].attention_site, self.config)
        return _Rows(x, p, h, is_image, memory)

    def _reach(self, half: Half, caches: Caches, shared: SharedHalf | None = None) -> Reach | RowReach:
        sizes, turns = (self.config.sliding_window, caches.ring), (self._plain, self._compressed)
        if self._by_rows:
            if shared is None:
                return reach_rows(half, *sizes, *turns)
            return reach_shared_rows(half, shared, *sizes, *turns)
        windows = plan_windows(half, *sizes) if shared is None else plan_shared_windows(half, shared, *sizes)
        return Reach(half, windows, rotations(half.positions, self._plain), rotations(half.positions, self._compressed))

    def _enter_source(self, reach: Reach | RowReach, layer: int, caches: Caches) -> None:
        if isinstance(reach, RowReach):
            reach.enter_source(caches, self.config, layer)
        else:
            reach.enter_source(LiveEntries(caches, self.config, layer, self.dtype))

    def _layer(self, number: int, rows: "_Rows", reach: Reach | RowReach, caches: Caches) -> "_Rows":
        """Both sites of a layer."""
        layer, eps = self.weights.layers[number], self.config.rms_norm_eps
        mix = beside(partial(site_mix, rows.x, layer.attention_site, self.config), Lane.STREAMS)
        y = self._attention[number](rows.h, reach, caches)
        x, h = advance(y, rows.x, mix(), layer.expert_site.norm, eps)
        after = beside(partial(site_mix, x, layer.expert_site, self.config), Lane.STREAMS)
        per_token, routed = self.config.num_experts_per_tok, self.experts[number]
        y = mixture(h, rows.is_image, per_token, layer.experts, self.config, routed)
        made = after()
        x, h = advance(y, x, made, self._norm_after(number), eps)
        return replace(rows, x=x, p=made.pre, h=h)

    def _norm_after(self, layer: int) -> Tensor:
        """FP32 [H], the norm of what comes after a layer: the next one's attention, or the head."""
        layers = self.weights.layers
        return layers[layer + 1].attention_site.norm if layer + 1 < len(layers) else self.weights.norm


def _indexing(rows: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda values: values[rows]


class _LayerAttention(Protocol):
    def __call__(self, h: Tensor, reach: Any, caches: Caches) -> Tensor: ...


@dataclass(frozen=True)
class _Rows:
    """What goes from layer to layer.

    x: streams [M, S, H]. p: FP32 [M, S], weights of the next collapse. h: [M, H], the next site's normed input.
    is_image: bool [M]; None: no image tokens. memory: None without Engram.
    """

    x: Tensor
    p: Tensor
    h: Tensor
    is_image: Tensor | None
    memory: Memory | None

    def of(self, pick: Callable[[Tensor], Tensor]) -> "_Rows":
        """The same of other rows, which `pick` finds in a tensor of all."""
        is_image = None if self.is_image is None else pick(self.is_image)
        memory = None if self.memory is None else self.memory.of(pick)
        return _Rows(pick(self.x), pick(self.p), pick(self.h), is_image, memory)

    def enter(self, x: Tensor, site: SiteWeights, config: ModelConfig) -> "_Rows":
        """The same with other streams, at a site."""
        return replace(self, x=x, h=site_input(x, self.p, site, config))


class _Features:
    """Collects what enters the drafting target layers, averaged over the streams."""

    def __init__(self, wanted: bool, config: ModelConfig) -> None:
        self._layers = config.dspark_target_layer_ids if wanted else ()
        self._wanted, self._found = wanted, list[Tensor]()

    def add(self, layer: int, x: Tensor) -> None:
        """Take note of the streams [M, S, H] that enter `layer`."""
        if layer in self._layers:
            self._found.append(x.mean(1, dtype=torch.float32))

    def narrow(self, pick: Callable[[Tensor], Tensor]) -> None:
        """Go on with other rows, which `pick` finds in a tensor of all."""
        self._found = [pick(feature) for feature in self._found]

    def joined(self, rows: int, like: Tensor) -> Tensor | None:
        """FP32 [rows, target layers * H]; None if nobody wants them."""
        if not self._wanted:
            return None
        if len(self._found) < len(self._layers):  # no row ran the later ones
            return torch.empty(rows, len(self._layers) * like.shape[-1], device=like.device)
        return torch.cat(self._found, dim=-1)
