"""A model written as a checkpoint and read again, and what a reading of the golden checkpoint holds."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from random_models import VARIANTS, build, prompt, tiny
from safetensors.torch import load_file
from torch import Tensor

from deepinfer.checkpoint import formats
from deepinfer.checkpoint.layout import Storage
from deepinfer.checkpoint.reader import Checkpoint
from deepinfer.checkpoint.writer import write_checkpoint
from deepinfer.reference.indexer import Ties
from deepinfer.reference.loading import load_reference, state, stored_names

ROUND_TRIPS: dict[Storage, Callable[[Tensor], Tensor]] = {
    Storage.F32: lambda x: x,
    Storage.BF16: lambda x: x.bfloat16().float(),
    Storage.FP8_BLOCKS: formats.fp8_blocks_round_trip,
    Storage.FP4_ROWS: formats.fp4_rows_round_trip,
    Storage.FP8_ROWS: formats.fp8_rows_round_trip,
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_written_model_reads_as_its_quantised_self(variant: str, tmp_path: Path) -> None:
    data = VARIANTS[variant]()
    model = build(data)
    write_checkpoint(tmp_path / "once", data, state(model))
    checkpoint = Checkpoint(tmp_path / "once")
    checkpoint.check()
    read = load_reference(checkpoint, model.classes.tolist())
    given, found = state(model), state(read)
    assert found.keys() == given.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, ROUND_TRIPS[checkpoint.layout[name].storage](given[name])), name
    ids = prompt(read, 9)
    assert bool(read(ids).logits.isfinite().all())
    assert not torch.equal(read(ids).logits, model(ids).logits)


def test_names() -> None:
    assert stored_names("layers.3.hc_attn.fn", 24) == ["layers.3.hc_attn_fn"]
    assert stored_names("mtp.0.hc_ffn.scale", 3) == ["mtp.0.hc_ffn_scale"]
    assert stored_names("layers.1.ffn.gate.bias", 4) == ["layers.1.ffn.gate.bias"]
    assert stored_names("layers.1.ffn.experts.w2", 2) == [f"layers.1.ffn.experts.{e}.w2.weight" for e in (0, 1)]


class TestGoldenCheckpoint:
    def test_every_tensor_is_used(self, golden_checkpoint: Path) -> None:
        checkpoint = Checkpoint(golden_checkpoint)
        assert state(load_reference(checkpoint)).keys() == checkpoint.layout.keys()

    def test_dtypes(self, golden_checkpoint: Path) -> None:
        checkpoint = Checkpoint(golden_checkpoint)
        model = load_reference(checkpoint, dtype=torch.bfloat16)
        kept = {name for name, spec in checkpoint.layout.items() if spec.storage is Storage.F32}
        assert {name for name, tensor in state(model).items() if tensor.dtype is torch.float32} == kept
        assert {tensor.dtype for tensor in state(model).values()} == {torch.float32, torch.bfloat16}
        assert not any(parameter.requires_grad for parameter in model.parameters())

    def test_runs_in_bf16(self, golden_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Finite, and close to FP32 in rows where no rounding and no choice of experts or positions falls otherwise.

        Random weights make many close choices; the median row makes another one somewhere.
        """
        checkpoint = Checkpoint(golden_checkpoint)
        classes = load_file(golden_checkpoint.parent / "engram.safetensors")["token_map"].tolist()
        ids = load_file(golden_checkpoint.parent / "text_fp32.safetensors")["text80.ids"][None]
        wide, narrow = load_reference(checkpoint, classes), load_reference(checkpoint, classes, torch.bfloat16)
        assert bool(narrow(ids).logits.isfinite().all())
        for name in ("attention.window_fp8", "attention.latent_nvfp4", "indexer.index_mxfp4"):
            monkeypatch.setattr(f"deepinfer.reference.{name}", lambda x: x)
        expected = wide(ids).logits
        error = (narrow(ids).logits - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert error.min() < 0.05

    def test_ties_reach_every_layer(self, golden_checkpoint: Path) -> None:
        checkpoint = Checkpoint(golden_checkpoint)
        assert {layer.attn.ties for layer in load_reference(checkpoint, ties=Ties.TOPK).layers} == {Ties.TOPK}
        assert {layer.attn.ties for layer in load_reference(checkpoint).layers} == {Ties.LOWEST}


def test_stacked_experts_come_apart_in_order() -> None:
    model = build(tiny())
    tensors = state(model)
    for expert in range(6):
        assert torch.equal(tensors[f"layers.2.ffn.experts.{expert}.w3.weight"], model.layers[2].ffn.experts.w3[expert])
