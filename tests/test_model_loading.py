"""The model's weights hold the checkpoint's values, joined and in the dtypes that the operators take."""

from pathlib import Path

import pytest
import torch
from model_rig import rig_of
from torch import Tensor

from deepinfer.checkpoint.formats import dequantize_fp8_rows
from deepinfer.checkpoint.layout import Storage
from deepinfer.checkpoint.reader import Checkpoint
from deepinfer.core.errors import CheckpointError
from deepinfer.model.loading import load_weights
from deepinfer.model.weights import ModelWeights, tensors


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def loaded(request: pytest.FixtureRequest, golden_checkpoint: Path) -> tuple[Checkpoint, ModelWeights, torch.dtype]:
    checkpoint = Checkpoint(golden_checkpoint)
    return checkpoint, load_weights(checkpoint, request.param), request.param


Loaded = tuple[Checkpoint, ModelWeights, torch.dtype]


def same(made: Tensor, *wanted: Tensor) -> None:
    """Bit for bit, one below the other."""
    assert torch.equal(made, torch.cat(wanted))


def test_joined_matrices(loaded: Loaded) -> None:
    checkpoint, weights, dtype = loaded
    for number, layer in enumerate(weights.layers):
        attention, experts = layer.attention, layer.experts

        def dense(name: str, at: str = f"layers.{number}.") -> Tensor:
            return checkpoint.load(f"{at}{name}.weight", dtype)

        same(attention.inputs, dense("attn.wq_a"), dense("attn.wkv"))
        groups = [part.T for part in dense("attn.wo_a").chunk(checkpoint.config.o_groups)]
        assert torch.equal(attention.wo_a, torch.stack(groups))
        same(experts.shared_w13, dense("ffn.shared_experts.w1"), dense("ffn.shared_experts.w3"))
        for expert in range(checkpoint.config.n_routed_experts):
            same(experts.w13[expert], dense(f"ffn.experts.{expert}.w1"), dense(f"ffn.experts.{expert}.w3"))
            same(experts.w2[expert], dense(f"ffn.experts.{expert}.w2"))


def test_parts_of_sources(loaded: Loaded) -> None:
    checkpoint, weights, _ = loaded
    config = checkpoint.config
    for number, layer in enumerate(weights.layers):
        attention, prefix = layer.attention, f"layers.{number}.attn.compressor."
        assert (attention.compressor is not None) == (number in config.kv_source_layer_ids)
        assert (attention.index_keys is not None) == (number in config.kv_source_layer_ids)
        assert (attention.indexer is not None) == (number in config.index_source_layer_ids)
        assert (layer.engram is not None) == config.has_engram(number)
        if attention.compressor is not None:
            names = [f"{prefix}wkv.weight", f"{prefix}wgate.weight"][: config.ratio(number)]
            same(attention.compressor.inputs, *(checkpoint.load(name) for name in names))


def test_scales_are_spread_over_their_coefficients(loaded: Loaded) -> None:
    checkpoint, weights, _ = loaded
    scale = checkpoint.load("layers.0.hc_ffn_scale")
    assert weights.layers[0].expert_site.scale.tolist() == [
        *scale[:1].expand(4),
        *scale[1:2].expand(4),
        *scale[2:].expand(16),
    ]


def test_the_engram_table_keeps_its_stored_form(loaded: Loaded) -> None:
    checkpoint, weights, _ = loaded
    layer = checkpoint.config.engram_layer_ids[0]
    engram = weights.layers[layer].engram
    assert engram is not None
    table = dequantize_fp8_rows(engram.codes.view(torch.float8_e4m3fn), engram.scales.view(torch.float8_e8m0fnu))
    assert torch.equal(table, checkpoint.load(f"layers.{layer}.engram.embed.weight"))


def test_dtypes(loaded: Loaded) -> None:
    """Matrices that multiply activations have their dtype; what the model computes in FP32 is FP32."""
    _, weights, dtype = loaded
    assert {weights.norm.dtype, weights.head.dtype} == {torch.float32}
    for layer in weights.layers:
        attention, experts = layer.attention, layer.experts
        dense = [attention.inputs, attention.wq_b, attention.wo_a, attention.wo_b, experts.w13, experts.w2]
        wide = [*tensors(layer.attention_site), attention.sink, experts.gate, experts.bias, experts.image_bias]
        wide += [*tensors(attention.compressor), attention.q_norm, attention.kv_norm]
        assert {tensor.dtype for tensor in dense} == {dtype}
        assert {tensor.dtype for tensor in wide} == {torch.float32}


def test_every_tensor_of_the_target_is_there_once(golden_checkpoint: Path) -> None:
    """By the count of numbers: in FP32, an Engram table apart, a weight has as many as its tensors on disk."""
    checkpoint = Checkpoint(golden_checkpoint)
    weights, config = load_weights(checkpoint), checkpoint.config
    held = sum(tensor.numel() for tensor in tensors(weights) if tensor.dtype is torch.float32)
    stored = 0
    for name, spec in checkpoint.layout.items():
        if not name.startswith("mtp.") and spec.storage is not Storage.FP8_ROWS:
            stored += torch.Size(spec.shape).numel()
    streams = config.hc_mult
    spread = 2 * config.num_hidden_layers * (2 * streams + streams**2 - 3)  # scales stand once a coefficient
    merged = len(config.engram_layer_ids) * streams * config.hidden_size  # query and key weight are one product
    assert held == stored + spread - merged + config.hidden_size  # the marker of image tokens, which cells replace


def test_nbytes_counts_all(golden_checkpoint: Path) -> None:
    weights = load_weights(Checkpoint(golden_checkpoint))
    assert weights.nbytes == sum(tensor.nbytes for tensor in tensors(weights)) > weights.embed.nbytes


def test_a_checkpoint_without_a_tensor_is_an_error(tiny_checkpoint: Path) -> None:
    checkpoint = Checkpoint(tiny_checkpoint)
    del checkpoint._files["layers.1.attn.wkv.weight"]
    with pytest.raises(CheckpointError, match=r"layers\.1\.attn\.wkv\.weight is missing"):
        load_weights(checkpoint)


def test_a_model_without_vision_has_no_tower() -> None:
    assert rig_of("no vision").model.weights.vision is None
