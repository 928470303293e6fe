"""Every tensor of a checkpoint, from the model configuration alone: name on disk, logical shape, storage.

A quantised tensor `NAME.weight` has a companion `NAME.scale`, which this table implies rather than lists.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

import torch

from deepinfer.checkpoint.formats import BLOCK
from deepinfer.config.model import ModelConfig, VisionConfig

COEFFICIENT_KINDS = 3  # pre, post and comb coefficients have a scale each


class Storage(Enum):
    """How a tensor lies on disk; the codecs are in `formats`."""

    BF16 = "BF16"
    F32 = "F32"
    FP8_BLOCKS = "E4M3 with 32x32 block scales"
    FP4_ROWS = "packed E2M1 with scales per row and 32 columns"
    FP8_ROWS = "E4M3 with scales per row and 32 columns"

    @property
    def quantized(self) -> bool:
        """Whether the tensor has a `.scale` companion."""
        return self not in (Storage.BF16, Storage.F32)


_DTYPES = {
    Storage.BF16: torch.bfloat16,
    Storage.F32: torch.float32,
    Storage.FP8_BLOCKS: torch.float8_e4m3fn,
    Storage.FP4_ROWS: torch.int8,
    Storage.FP8_ROWS: torch.float8_e4m3fn,
}


@dataclass(frozen=True)
class TensorSpec:
    """One tensor: its shape as the model sees it and how it is stored."""

    shape: tuple[int, ...]
    storage: Storage

    @property
    def stored_dtype(self) -> torch.dtype:
        """Element type on disk; a tensor that is not quantised may be found as either of BF16 and F32."""
        return _DTYPES[self.storage]

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape on disk: two FP4 values share a byte."""
        if self.storage is Storage.FP4_ROWS:
            return (*self.shape[:-1], self.shape[-1] // 2)
        return self.shape

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """Shape of the E8M0 companion, for a quantised tensor."""
        rows, columns = self.shape
        return (-(-rows // BLOCK) if self.storage is Storage.FP8_BLOCKS else rows, -(-columns // BLOCK))

    @property
    def stored_bytes(self) -> int:
        """Bytes on disk, scales included."""
        scales = math.prod(self.scale_shape) if self.storage.quantized else 0
        return math.prod(self.stored_shape) * self.stored_dtype.itemsize + scales


Named = Iterator[tuple[str, TensorSpec]]


def scale_name(name: str) -> str:
    """Name of the scales of quantised tensor `name`."""
    return name.removesuffix("weight") + "scale"


def tensor_layout(config: ModelConfig, head: Storage = Storage.F32) -> dict[str, TensorSpec]:
    """Name -> spec of every tensor of a checkpoint, in the order of the forward pass.

    `head` is how the output head is to be written; like all tensors that are not quantised it is read as stored.
    """
    return dict(_model(config, head))


def _model(c: ModelConfig, head: Storage) -> Named:
    yield "embed.weight", _bf16(c.vocab_size, c.hidden_size)
    if c.vision is not None:
        yield from _vision(c, c.vision)
    for layer in range(c.num_hidden_layers):
        yield from _prefixed(f"layers.{layer}.", _layer(c, layer))
    yield "norm.weight", _bf16(c.hidden_size)
    yield "head.weight", TensorSpec((c.vocab_size, c.hidden_size), head)
    for stage in range(c.draft_stages):
        yield from _prefixed(f"mtp.{stage}.", _draft_stage(c, stage))


def _layer(c: ModelConfig, layer: int) -> Named:
    if c.has_engram(layer):
        yield from _prefixed("engram.", _engram(c, c.engram_num_embeddings[c.engram_layer_ids.index(layer)]))
    yield from _sites(c)
    yield from _prefixed("attn.", _attention(c))
    if layer in c.kv_source_layer_ids:
        yield from _prefixed("attn.compressor.", _compressor(c, c.ratio(layer)))
    if layer in c.index_source_layer_ids:
        yield from _prefixed("attn.indexer.", _indexer(c, makes_keys=layer in c.kv_source_layer_ids))
    yield from _prefixed("ffn.", _experts(c, c.n_routed_experts))


def _draft_stage(c: ModelConfig, stage: int) -> Named:
    if stage == 0:
        yield "main_proj.weight", _fp8(c.hidden_size, len(c.dspark_target_layer_ids) * c.hidden_size)
        yield "main_norm.weight", _bf16(c.hidden_size)
    yield from _sites(c)
    yield from _prefixed("attn.", _attention(c))
    yield from _prefixed("ffn.", _experts(c, c.dspark_n_routed_experts))
    if stage == c.draft_stages - 1:
        yield "norm.weight", _bf16(c.hidden_size)
        yield "markov_head.embed.weight", _bf16(c.vocab_size, c.dspark_markov_rank)
        yield "markov_head.head.weight", _bf16(c.vocab_size, c.dspark_markov_rank)
        yield "confidence_head.proj.weight", _f32(1, c.hidden_size + c.dspark_markov_rank)


def _sites(c: ModelConfig) -> Named:
    """The norm and the residual-mixing coefficients of a block's two sites."""
    coefficients = c.hc_mult * (2 + c.hc_mult)
    for site in ("attn", "ffn"):
        yield f"{site}_norm.weight", _bf16(c.hidden_size)
        yield f"hc_{site}_fn", _f32(coefficients, c.hc_mult * c.hidden_size)
        yield f"hc_{site}_base", _f32(coefficients)
        yield f"hc_{site}_scale", _f32(COEFFICIENT_KINDS)


def _attention(c: ModelConfig) -> Named:
    yield "wq_a.weight", _fp8(c.q_lora_rank, c.hidden_size)
    yield "q_norm.weight", _bf16(c.q_lora_rank)
    yield "wq_b.weight", _fp8(c.num_attention_heads * c.head_dim, c.q_lora_rank)
    yield "wkv.weight", _fp8(c.head_dim, c.hidden_size)
    yield "kv_norm.weight", _bf16(c.head_dim)
    yield "attn_sink", _f32(c.num_attention_heads)
    yield "wo_a.weight", _fp8(c.o_groups * c.o_lora_rank, c.num_attention_heads // c.o_groups * c.head_dim)
    yield "wo_b.weight", _fp8(c.hidden_size, c.o_groups * c.o_lora_rank)


def _compressor(c: ModelConfig, ratio: int) -> Named:
    yield "wkv.weight", _f32(c.head_dim, c.hidden_size)
    if ratio > 1:
        yield "wgate.weight", _f32(c.head_dim, c.hidden_size)
    yield "norm.weight", _bf16(c.head_dim)


def _indexer(c: ModelConfig, makes_keys: bool) -> Named:
    yield "wq_b.weight", _fp8(c.index_n_heads * c.index_head_dim, c.q_lora_rank)
    yield "weights_proj.weight", _bf16(c.index_n_heads, c.hidden_size)
    if makes_keys:
        yield "wk.weight", _bf16(c.index_head_dim, c.head_dim)
        yield "k_norm.weight", _bf16(c.index_head_dim)


def _experts(c: ModelConfig, routed: int) -> Named:
    hidden, width = c.hidden_size, c.moe_intermediate_size
    shapes = {"w1": (width, hidden), "w2": (hidden, width), "w3": (width, hidden)}
    yield "gate.weight", _bf16(routed, hidden)
    yield "gate.bias", _f32(routed)
    yield "gate.bias_vl", _f32(routed)
    for expert in range(routed):
        for name, shape in shapes.items():
            yield f"experts.{expert}.{name}.weight", TensorSpec(shape, Storage.FP4_ROWS)
    for name, shape in shapes.items():
        yield f"shared_experts.{name}.weight", _fp8(*shape)


def _engram(c: ModelConfig, rows: int) -> Named:
    read = (c.engram_max_ngram_size - 1) * c.engram_n_heads * c.engram_head_dim
    yield "embed.weight", TensorSpec((rows, c.engram_head_dim), Storage.FP8_ROWS)
    yield "wkv.weight", _fp8((c.hc_mult + 1) * c.hidden_size, read)
    yield "q_weight", _bf16(c.hc_mult, c.hidden_size)
    yield "k_weight", _bf16(c.hc_mult, c.hidden_size)


def _vision(c: ModelConfig, v: VisionConfig) -> Named:
    yield from _linear("vision.patch_embed.proj", v.hidden_size, 3 * v.patch_size**2)
    for block in range(v.num_hidden_layers):
        yield from _prefixed(f"vision.blocks.{block}.", _vision_block(v))
    yield "vision.norm.weight", _f32(v.hidden_size)
    yield from _linear("aligner.w1", c.hidden_size, v.hidden_size * v.downsample_ratio**2)
    yield from _linear("aligner.w2", c.hidden_size, c.hidden_size)
    for name in ("image_start", "image_end", "image_newline"):
        yield name, _bf16(c.hidden_size)


def _vision_block(v: VisionConfig) -> Named:
    yield "norm1.weight", _f32(v.hidden_size)
    yield from _linear("attn.wqkv", 3 * v.hidden_size, v.hidden_size)
    yield from _linear("attn.wo", v.hidden_size, v.hidden_size)
    yield "norm2.weight", _f32(v.hidden_size)
    yield "mlp.w1.weight", _bf16(2 * v.intermediate_size, v.hidden_size)
    yield "mlp.w2.weight", _bf16(v.hidden_size, v.intermediate_size)


def _linear(name: str, rows: int, columns: int) -> Named:
    yield f"{name}.weight", _bf16(rows, columns)
    yield f"{name}.bias", _bf16(rows)


def _prefixed(prefix: str, named: Named) -> Named:
    return ((prefix + name, spec) for name, spec in named)


def _bf16(*shape: int) -> TensorSpec:
    return TensorSpec(shape, Storage.BF16)


def _f32(*shape: int) -> TensorSpec:
    return TensorSpec(shape, Storage.F32)


def _fp8(*shape: int) -> TensorSpec:
    return TensorSpec(shape, Storage.FP8_BLOCKS)
