"""Random weights: of the stored formats and shapes, sized so that a model of them runs, and spread as loads are."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from released_config import golden

from deepinfer import LLM, SamplingParams
from deepinfer.checkpoint.layout import Storage
from deepinfer.checkpoint.random import RandomCheckpoint
from deepinfer.config.model import ModelConfig
from deepinfer.model.loading import load_weights
from deepinfer.ops.linear import Fp8Weight
from deepinfer.ops.router import route


@pytest.fixture(scope="module")
def checkpoint() -> RandomCheckpoint:
    return RandomCheckpoint(ModelConfig.from_dict(golden(), "test"))


def test_tensors_have_the_stored_shapes_and_dtypes(checkpoint: RandomCheckpoint) -> None:
    for name, spec in checkpoint.layout.items():
        codes, scales = checkpoint.load_raw(name)
        assert codes.shape == spec.stored_shape
        assert codes.dtype is spec.stored_dtype
        assert (scales is not None) == spec.storage.quantized
        assert scales is None or scales.shape == spec.scale_shape


def test_a_tensor_depends_on_its_name_and_the_seed_only(checkpoint: RandomCheckpoint) -> None:
    config, name = checkpoint.config, "layers.0.attn.wq_b.weight"
    first, again = checkpoint.load_raw(name)[0], checkpoint.load_raw(name)[0]
    other = RandomCheckpoint(config, seed=1).load_raw(name)[0]
    assert torch.equal(first.float(), again.float())
    assert not torch.equal(first.float(), other.float())
    assert not torch.equal(first.float(), checkpoint.load_raw("layers.1.attn.wq_b.weight")[0].float())


@pytest.mark.parametrize("storage", [Storage.FP8_BLOCKS, Storage.FP4_ROWS, Storage.BF16], ids=lambda s: s.name)
def test_matrices_keep_the_size_of_what_they_multiply(checkpoint: RandomCheckpoint, storage: Storage) -> None:
    weights = load_weights(checkpoint)
    layer = weights.layers[2]
    matrix = {
        Storage.FP8_BLOCKS: layer.attention.wq_b,
        Storage.FP4_ROWS: layer.experts.w13[0],
        Storage.BF16: layer.experts.gate,
    }[storage]
    x = torch.randn(64, matrix.shape[-1], generator=torch.Generator().manual_seed(0))
    assert 0.6 < (x @ matrix.T).std().item() < 1.5


def test_loads_are_spread(checkpoint: RandomCheckpoint) -> None:
    experts, hidden = 48, 256
    changes = {"n_routed_experts": experts, "hidden_size": hidden, "num_experts_per_tok": 6}
    data = golden()
    data["text_config"].update(changes)
    weights = RandomCheckpoint(ModelConfig.from_dict(data, "test"))
    gate, bias = (weights.load(f"layers.3.ffn.gate.{name}") for name in ("weight", "bias"))
    h = torch.randn(20000, hidden, generator=torch.Generator().manual_seed(1))
    loads = route(h, gate, bias, 6, 1.0)[0].flatten().bincount(minlength=experts).float()
    assert 0.3 < loads.log().std().item() < 0.6


def test_kept_weights_are_smaller(checkpoint: RandomCheckpoint) -> None:
    kept = load_weights(checkpoint, torch.bfloat16, keep_quantized=True)
    matrix, dense = kept.layers[0].attention.wq_b, load_weights(checkpoint, torch.bfloat16)
    assert isinstance(matrix, Fp8Weight)
    assert torch.allclose(matrix.dequantized(), dense.layers[0].attention.wq_b.float(), rtol=2**-7, atol=1e-5)
    assert kept.nbytes < 0.8 * dense.nbytes


def test_a_random_model_generates(tmp_path: Path, golden_checkpoint: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(golden_checkpoint / name, tmp_path / name)
    llm = LLM(tmp_path, load_format="random", keep_quantized=True, dtype="bfloat16", cache_bytes=1 << 24)
    outputs = llm.generate([[5, 6, 7], list(range(8, 60))], SamplingParams(max_tokens=4, ignore_eos=True))
    assert [len(output.outputs[0].token_ids) for output in outputs] == [4, 4]
    assert json.loads((tmp_path / "config.json").read_text())["text_config"]["hidden_size"] == llm.config.hidden_size
