"""Fills the model's weights from a checkpoint."""

from collections.abc import Sequence

import torch
from torch import Tensor

from deepinfer.checkpoint.reader import Checkpoint
from deepinfer.config.model import ModelConfig
from deepinfer.model.vision import Affine, VisionBlockWeights, VisionWeights
from deepinfer.model.weights import (
    AttentionWeights,
    CompressorWeights,
    DraftWeights,
    EngramWeights,
    ExpertWeights,
    IndexerWeights,
    IndexKeyWeights,
    LayerWeights,
    ModelWeights,
    SiteWeights,
)
from deepinfer.ops.engram import EngramHashing


def load_weights(
    checkpoint: Checkpoint, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> ModelWeights:
    """The target's weights, dequantised; `dtype` is that of dense weights and of activations, FP32 or BF16.

    Raises CheckpointError for a tensor that is missing or misshapen.
    """
    return _Loader(checkpoint, dtype, torch.device(device)).model()


def load_drafter(
    checkpoint: Checkpoint, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> DraftWeights:
    """The drafter's weights, as `load_weights` loads the target's; the checkpoint must have draft stages."""
    return _Loader(checkpoint, dtype, torch.device(device)).drafter()


class _Loader:
    """Reads tensors under a name's prefix, each to its place and dtype."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        self._checkpoint, self._dtype, self._device = checkpoint, dtype, device
        self._config: ModelConfig = checkpoint.config

    def dense(self, *names: str) -> Tensor:
        """Tensors in the dtype of activations, one below the other."""
        parts = [self._checkpoint.load(name, self._dtype) for name in names]
        return (torch.cat(parts) if len(parts) > 1 else parts[0]).to(self._device)

    def wide(self, *names: str) -> Tensor:
        """Tensors in FP32, one below the other."""
        parts = [self._checkpoint.load(name, torch.float32) for name in names]
        return (torch.cat(parts) if len(parts) > 1 else parts[0]).to(self._device)

    def model(self) -> ModelWeights:
        return ModelWeights(
            embed=self.dense("embed.weight"),
            layers=tuple(self.layer(number) for number in range(self._config.num_hidden_layers)),
            norm=self.wide("norm.weight"),
            head=self.wide("head.weight"),
            vision=self.vision() if self._config.vision is not None else None,
        )

    def layer(self, number: int) -> LayerWeights:
        return self.block(f"layers.{number}.", number, self._config.n_routed_experts)

    def block(self, prefix: str, number: int, experts: int) -> LayerWeights:
        """A layer, or the draft stage that counts as layer `number`."""
        return LayerWeights(
            attention_site=self.site(prefix, "attn"),
            expert_site=self.site(prefix, "ffn"),
            attention=self.attention(f"{prefix}attn.", number),
            experts=self.experts(f"{prefix}ffn.", experts),
            engram=self.engram(f"{prefix}engram.", number) if self._config.has_engram(number) else None,
        )

    def drafter(self) -> DraftWeights:
        config = self._config
        last = f"mtp.{config.draft_stages - 1}."
        stages = range(config.draft_stages)
        return DraftWeights(
            main_proj=self.dense("mtp.0.main_proj.weight"),
            main_norm=self.wide("mtp.0.main_norm.weight"),
            stages=tuple(
                self.block(f"mtp.{n}.", config.num_hidden_layers + n, config.dspark_n_routed_experts) for n in stages
            ),
            wkv=self.dense(*(f"mtp.{n}.attn.wkv.weight" for n in stages)),
            norm=self.wide(f"{last}norm.weight"),
            markov_embed=self.wide(f"{last}markov_head.embed.weight"),
            markov_head=self.wide(f"{last}markov_head.head.weight"),
            confidence=self.wide(f"{last}confidence_head.proj.weight")[0],
        )

    def site(self, prefix: str, site: str) -> SiteWeights:
        streams = self._config.hc_mult
        sizes = torch.tensor([streams, streams, streams * streams], device=self._device)
        scale = self.wide(f"{prefix}hc_{site}_scale").repeat_interleave(sizes)
        name = f"{prefix}hc_{site}_"
        return SiteWeights(
            self.wide(f"{prefix}{site}_norm.weight"), self.wide(f"{name}fn"), self.wide(f"{name}base"), scale
        )

    def attention(self, prefix: str, layer: int) -> AttentionWeights:
        """The attention weights of a layer, with what only source layers have."""
        config = self._config
        wo_a = self.dense(f"{prefix}wo_a.weight").view(config.o_groups, config.o_lora_rank, -1)
        makes_keys = layer in config.kv_source_layer_ids
        return AttentionWeights(
            inputs=self.dense(f"{prefix}wq_a.weight", f"{prefix}wkv.weight"),
            q_norm=self.wide(f"{prefix}q_norm.weight"),
            kv_norm=self.wide(f"{prefix}kv_norm.weight"),
            wq_b=self.dense(f"{prefix}wq_b.weight"),
            sink=self.wide(f"{prefix}attn_sink"),
            wo_a=wo_a.transpose(1, 2).contiguous(),
            wo_b=self.dense(f"{prefix}wo_b.weight"),
            compressor=self.compressor(f"{prefix}compressor.", config.ratio(layer)) if makes_keys else None,
            index_keys=self.index_keys(f"{prefix}indexer.") if makes_keys else None,
            indexer=self.indexer(f"{prefix}indexer.") if layer in config.index_source_layer_ids else None,
        )

    def compressor(self, prefix: str, ratio: int) -> CompressorWeights:
        names = ("wkv", "wgate")[:ratio]
        return CompressorWeights(
            self.wide(*(f"{prefix}{name}.weight" for name in names)), self.wide(f"{prefix}norm.weight")
        )

    def index_keys(self, prefix: str) -> IndexKeyWeights:
        return IndexKeyWeights(self.dense(f"{prefix}wk.weight"), self.wide(f"{prefix}k_norm.weight"))

    def indexer(self, prefix: str) -> IndexerWeights:
        return IndexerWeights(self.dense(f"{prefix}wq_b.weight"), self.dense(f"{prefix}weights_proj.weight"))

    def experts(self, prefix: str, count: int) -> ExpertWeights:
        routed = [f"{prefix}experts.{expert}." for expert in range(count)]
        return ExpertWeights(
            gate=self.wide(f"{prefix}gate.weight"),
            bias=self.wide(f"{prefix}gate.bias"),
            image_bias=self.wide(f"{prefix}gate.bias_vl"),
            w13=self.stacked(routed, "w1.weight", "w3.weight"),
            w2=self.stacked(routed, "w2.weight"),
            shared_w13=self.dense(f"{prefix}shared_experts.w1.weight", f"{prefix}shared_experts.w3.weight"),
            shared_w2=self.dense(f"{prefix}shared_experts.w2.weight"),
        )

    def stacked(self, prefixes: Sequence[str], *names: str) -> Tensor:
        """For every prefix the tensors `names` below each other: [len(prefixes), ...], filled one by one."""
        first = self.dense(*(prefixes[0] + name for name in names))
        stack = torch.empty((len(prefixes), *first.shape), dtype=self._dtype, device=self._device)
        stack[0] = first
        for place, prefix in zip(stack[1:], prefixes[1:], strict=True):
            place.copy_(self.dense(*(prefix + name for name in names)))
        return stack

    def engram(self, prefix: str, layer: int) -> EngramWeights:
        codes, scales = self._checkpoint.load_raw(f"{prefix}embed.weight")
        assert scales is not None, "the layout stores Engram tables with scales"
        index = self._config.engram_layer_ids.index(layer)
        return EngramWeights(
            codes=codes.view(torch.uint8).to(self._device),
            scales=scales.view(torch.uint8).to(self._device),
            wkv=self.dense(f"{prefix}wkv.weight"),
            qk=self.wide(f"{prefix}q_weight") * self.wide(f"{prefix}k_weight"),
            hashing=EngramHashing.from_config(self._config)[index].to(self._device),
        )

    def vision(self) -> VisionWeights:
        """The vision tower and the aligner."""
        assert self._config.vision is not None
        markers = [self.dense(f"image_{name}") for name in ("start", "start", "newline", "end")]
        return VisionWeights(
            patch_embed=self.affine("vision.patch_embed.proj"),
            blocks=tuple(
                self.vision_block(f"vision.blocks.{n}.") for n in range(self._config.vision.num_hidden_layers)
            ),
            norm=self.wide("vision.norm.weight"),
            w1=self.affine("aligner.w1"),
            w2=self.affine("aligner.w2"),
            markers=torch.stack(markers),
        )

    def vision_block(self, prefix: str) -> VisionBlockWeights:
        return VisionBlockWeights(
            norm1=self.wide(f"{prefix}norm1.weight"),
            wqkv=self.affine(f"{prefix}attn.wqkv"),
            wo=self.affine(f"{prefix}attn.wo"),
            norm2=self.wide(f"{prefix}norm2.weight"),
            w1=self.dense(f"{prefix}mlp.w1.weight"),
            w2=self.dense(f"{prefix}mlp.w2.weight"),
        )

    def affine(self, name: str) -> Affine:
        return Affine(self.dense(f"{name}.weight"), self.dense(f"{name}.bias"))
