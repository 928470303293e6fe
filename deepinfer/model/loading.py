"""Fills the model's weights from a checkpoint."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

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
from deepinfer.ops.experts import Experts, fits, tile_experts
from deepinfer.ops.linear import Fp8Weight, Weight, fold_blocks, fold_rows, join


class Weights(Protocol):
    """Where tensors come from: a `Checkpoint`, or a `RandomCheckpoint`, whose tensors lie on the device already."""

    @property
    def config(self) -> ModelConfig:
        """The model's configuration."""

    def load(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """Tensor `name`, dequantised and rounded to `dtype`."""

    def load_raw(self, name: str) -> tuple[Tensor, Tensor | None]:
        """Tensor `name` as stored, and its scales."""


@dataclass(frozen=True)
class Form:
    """How weights are held: in which dtype, on which device, quantised or not; Engram tables perhaps on the host."""

    dtype: torch.dtype
    device: torch.device
    keep_quantized: bool
    tables_on_host: bool = False

    @property
    def tables_on(self) -> torch.device:
        """Where the Engram tables lie."""
        return torch.device("cpu") if self.tables_on_host else self.device


@dataclass(frozen=True)
class Share:
    """The part of a model that a rank reads.

    experts: which routed experts of each layer, in which order; empty: all. part, parts: of the rows of Engram tables.
    """

    experts: Sequence[Sequence[int]] = ()
    part: int = 0
    parts: int = 1


def load_weights(
    checkpoint: Weights,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    keep_quantized: bool = False,
    share: Share | None = None,
    tables_on: torch.device | str | None = None,
) -> ModelWeights:
    """The target's weights; `dtype` is that of dense weights and of activations, FP32 or BF16.

    `keep_quantized` leaves FP8 and FP4 matrices as stored, in the form that the products take; else they are
    dequantised. `share`: what to read; None: all. `tables_on`: the device of the Engram tables; None: `device`.
    Raises CheckpointError for a tensor that is missing or misshapen.
    """
    return _Loader(checkpoint, dtype, torch.device(device), keep_quantized, share, tables_on).model()


def load_routed(checkpoint: Weights, layer: int, experts: Sequence[int], form: Form) -> tuple[Experts, Experts]:
    """`w13` and `w2` of some routed experts of a layer, in the form in which `load_weights` has them."""
    routed = [f"layers.{layer}.ffn.experts.{expert}." for expert in experts]
    loader = _Loader(checkpoint, form.dtype, form.device, form.keep_quantized)
    return loader.experts_of(routed, "w1.weight", "w3.weight"), loader.experts_of(routed, "w2.weight")


def load_drafter(
    checkpoint: Weights,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    keep_quantized: bool = False,
) -> DraftWeights:
    """The drafter's weights, as `load_weights` loads the target's; the checkpoint must have draft stages."""
    return _Loader(checkpoint, dtype, torch.device(device), keep_quantized).drafter()


def load_vision(
    checkpoint: Weights, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> VisionWeights:
    """The weights of vision tower and aligner alone; the checkpoint must have them."""
    return _Loader(checkpoint, dtype, torch.device(device), False).vision()


class _Loader:
    """Reads tensors under a name's prefix, each to its place and dtype."""

    def __init__(
        self,
        checkpoint: Weights,
        dtype: torch.dtype,
        device: torch.device,
        keep: bool,
        share: Share | None = None,
        tables_on: torch.device | str | None = None,
    ) -> None:
        self._checkpoint, self._dtype, self._device, self._keep = checkpoint, dtype, device, keep
        self._share, self._tables_on = share or Share(), tables_on or device
        self._config: ModelConfig = checkpoint.config

    def dense(self, *names: str) -> Tensor:
        """Tensors in the dtype of activations, one below the other."""
        parts = [self._checkpoint.load(name, self._dtype) for name in names]
        return (torch.cat(parts) if len(parts) > 1 else parts[0]).to(self._device)

    def matrix(self, *names: str) -> Weight:
        """Matrices that are stored in FP8, one below the other."""
        if not self._keep:
            return self.dense(*names)
        return join([fold_blocks(*self.stored(name)) for name in names])

    def stored(self, name: str) -> tuple[Tensor, Tensor]:
        """Codes and scales of a quantised tensor, on the device."""
        codes, scales = self._checkpoint.load_raw(name)
        assert scales is not None, f"the layout stores {name} with scales"
        return codes.to(self._device), scales.to(self._device)

    def product(self, name: str) -> Tensor:
        """A matrix whose product is FP32: as stored if it is BF16 and weights are kept."""
        keeps = self._keep and self._checkpoint.load_raw(name)[0].dtype is torch.bfloat16
        return self._checkpoint.load(name, torch.bfloat16).to(self._device) if keeps else self.wide(name)

    def wide(self, *names: str) -> Tensor:
        """Tensors in FP32, one below the other."""
        parts = [self._checkpoint.load(name, torch.float32) for name in names]
        return (torch.cat(parts) if len(parts) > 1 else parts[0]).to(self._device)

    def model(self) -> ModelWeights:
        return ModelWeights(
            embed=self.dense("embed.weight"),
            layers=tuple(self.layer(number) for number in range(self._config.num_hidden_layers)),
            norm=self.wide("norm.weight"),
            head=self.product("head.weight"),
            vision=self.vision() if self._config.vision is not None else None,
        )

    def layer(self, number: int) -> LayerWeights:
        experts = self._share.experts[number] if self._share.experts else range(self._config.n_routed_experts)
        return self.block(f"layers.{number}.", number, experts)

    def block(self, prefix: str, number: int, experts: Sequence[int]) -> LayerWeights:
        """A layer, or the draft stage that counts as layer `number`."""
        return LayerWeights(
            attention_site=self.site(prefix, "attn"),
            expert_site=self.site(prefix, "ffn"),
            attention=self.attention(f"{prefix}attn.", number),
            experts=self.experts(f"{prefix}ffn.", experts),
            engram=self.engram(f"{prefix}engram.", number) if self._config.has_engram(number) else None,
        )

    def drafter(self) -> DraftWeights:
        """The weights of all draft stages; CheckpointError for a tensor that is missing or misshapen."""
        config = self._config
        last = f"mtp.{config.draft_stages - 1}."
        stages = range(config.draft_stages)
        return DraftWeights(
            main_proj=self.dense("mtp.0.main_proj.weight"),
            main_norm=self.wide("mtp.0.main_norm.weight"),
            stages=tuple(
                self.block(f"mtp.{n}.", config.num_hidden_layers + n, range(config.dspark_n_routed_experts))
                for n in stages
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
        makes_keys = layer in config.kv_source_layer_ids
        return AttentionWeights(
            inputs=self.matrix(f"{prefix}wq_a.weight", f"{prefix}wkv.weight"),
            q_norm=self.wide(f"{prefix}q_norm.weight"),
            kv_norm=self.wide(f"{prefix}kv_norm.weight"),
            wq_b=self.matrix(f"{prefix}wq_b.weight"),
            sink=self.wide(f"{prefix}attn_sink"),
            wo_a=self.output_groups(f"{prefix}wo_a.weight"),
            wo_b=self.matrix(f"{prefix}wo_b.weight"),
            compressor=self.compressor(f"{prefix}compressor.", config.ratio(layer)) if makes_keys else None,
            index_keys=self.index_keys(f"{prefix}indexer.") if makes_keys else None,
            indexer=self.indexer(f"{prefix}indexer.") if layer in config.index_source_layer_ids else None,
        )

    def output_groups(self, name: str) -> Weight:
        """The first output projection, a matrix a group, as `grouped_linear` takes it."""
        groups, matrix = self._config.o_groups, self.matrix(name)
        if isinstance(matrix, Fp8Weight):
            columns = matrix.shape[1]
            return Fp8Weight(matrix.codes.view(groups, -1, columns), matrix.scales.view(groups, -1))
        return matrix.view(groups, self._config.o_lora_rank, -1).transpose(1, 2).contiguous()

    def compressor(self, prefix: str, ratio: int) -> CompressorWeights:
        names = ("wkv", "wgate")[:ratio]
        return CompressorWeights(
            self.wide(*(f"{prefix}{name}.weight" for name in names)), self.wide(f"{prefix}norm.weight")
        )

    def index_keys(self, prefix: str) -> IndexKeyWeights:
        return IndexKeyWeights(self.dense(f"{prefix}wk.weight"), self.wide(f"{prefix}k_norm.weight"))

    def indexer(self, prefix: str) -> IndexerWeights:
        return IndexerWeights(self.matrix(f"{prefix}wq_b.weight"), self.dense(f"{prefix}weights_proj.weight"))

    def experts(self, prefix: str, held: Sequence[int]) -> ExpertWeights:
        routed = [f"{prefix}experts.{expert}." for expert in held]
        return ExpertWeights(
            gate=self.product(f"{prefix}gate.weight"),
            bias=self.wide(f"{prefix}gate.bias"),
            image_bias=self.wide(f"{prefix}gate.bias_vl"),
            w13=self.experts_of(routed, "w1.weight", "w3.weight"),
            w2=self.experts_of(routed, "w2.weight"),
            shared_w13=self.matrix(f"{prefix}shared_experts.w1.weight", f"{prefix}shared_experts.w3.weight"),
            shared_w2=self.matrix(f"{prefix}shared_experts.w2.weight"),
        )

    def experts_of(self, prefixes: Sequence[str], *names: str) -> Experts:
        """For every expert the tensors `names` below each other, in the form that `routed_experts` takes."""
        if not self._keep:
            return self.stacked(prefixes, *names)
        parts = [[self._checkpoint.load_raw(prefix + name) for name in names] for prefix in prefixes]
        codes = torch.stack([torch.cat([part[0] for part in expert]) for expert in parts]).to(self._device)
        scales = torch.stack([torch.cat([_bytes(part[1]) for part in expert]) for expert in parts]).to(self._device)
        if not fits(codes.shape[1], 2 * codes.shape[2]):
            return fold_rows(codes, scales)
        experts, rounded = tile_experts(codes, scales, paired=len(names) == 2)
        if rounded:
            warnings.warn(f"{prefixes[0]}*: {rounded} blocks have scales far below their row's", stacklevel=2)
        return experts

    def stacked(self, prefixes: Sequence[str], *names: str) -> Tensor:
        """For every prefix the tensors `names` below each other: [len(prefixes), ...], filled one by one."""
        first = self.dense(*(prefixes[0] + name for name in names))
        stack = torch.empty((len(prefixes), *first.shape), dtype=self._dtype, device=self._device)
        stack[0] = first
        for place, prefix in zip(stack[1:], prefixes[1:], strict=True):
            place.copy_(self.dense(*(prefix + name for name in names)))
        return stack

    def engram(self, prefix: str, layer: int) -> EngramWeights:
        codes, scales = (part.to(self._tables_on) for part in self.table(f"{prefix}embed.weight"))
        index = self._config.engram_layer_ids.index(layer)
        return EngramWeights(
            codes=codes.view(torch.uint8),
            scales=scales.view(torch.uint8),
            wkv=self.matrix(f"{prefix}wkv.weight"),
            qk=self.wide(f"{prefix}q_weight") * self.wide(f"{prefix}k_weight"),
            hashing=EngramHashing.from_config(self._config)[index].to(self._device),
        )

    def table(self, name: str) -> tuple[Tensor, Tensor]:
        """This rank's rows of a table."""
        codes, scales = self._checkpoint.load_raw(name)
        assert scales is not None, f"the layout stores {name} with scales"
        each = -(-len(codes) // self._share.parts)
        rows = slice(self._share.part * each, (self._share.part + 1) * each)
        return codes[rows], scales[rows]

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


def _bytes(scales: Tensor | None) -> Tensor:
    assert scales is not None, "the layout stores experts with scales"
    return scales.view(torch.uint8)
