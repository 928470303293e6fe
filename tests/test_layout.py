"""The tensors of a checkpoint from its configuration: the golden index exactly, the released model's known facts."""

import math
import re
from collections import Counter

import pytest
import torch
from released_config import CHECKPOINT, edited, golden, released, small
from safetensors import safe_open

from deepinfer.checkpoint.layout import Storage, TensorSpec, scale_name, tensor_layout
from deepinfer.config.model import ModelConfig

SAFETENSORS_DTYPES = {
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8,
}


def layout_of(config: dict, head: Storage = Storage.F32) -> dict[str, TensorSpec]:
    return tensor_layout(ModelConfig.from_dict(config, "config.json"), head)


def on_disk(layout: dict[str, TensorSpec]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    stored = {name: (spec.stored_dtype, spec.stored_shape) for name, spec in layout.items()}
    for name, spec in layout.items():
        if spec.storage.quantized:
            stored[scale_name(name)] = (torch.float8_e8m0fnu, spec.scale_shape)
    return stored


def test_golden_checkpoint_exactly() -> None:
    found = {}
    for path in CHECKPOINT.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - a safetensors handle is not iterable
                entry = file.get_slice(name)
                found[name] = (SAFETENSORS_DTYPES[entry.get_dtype()], tuple(entry.get_shape()))
    assert on_disk(layout_of(golden())) == found


@pytest.fixture(scope="module")
def released_layout() -> dict[str, TensorSpec]:
    return layout_of(released())


DRAFT = {
    "mtp.0.attn_norm.weight": ((5120,), Storage.BF16, None),
    "mtp.0.attn.wq_a.weight": ((1280, 5120), Storage.FP8_BLOCKS, (40, 160)),
    "mtp.0.attn.q_norm.weight": ((1280,), Storage.BF16, None),
    "mtp.0.attn.wq_b.weight": ((32768, 1280), Storage.FP8_BLOCKS, (1024, 40)),
    "mtp.0.attn.wkv.weight": ((512, 5120), Storage.FP8_BLOCKS, (16, 160)),
    "mtp.0.attn.wo_a.weight": ((8192, 4096), Storage.FP8_BLOCKS, (256, 128)),
    "mtp.0.attn.wo_b.weight": ((5120, 8192), Storage.FP8_BLOCKS, (160, 256)),
    "mtp.0.attn.attn_sink": ((64,), Storage.F32, None),
    "mtp.0.hc_attn_fn": ((24, 20480), Storage.F32, None),
    "mtp.1.hc_ffn_base": ((24,), Storage.F32, None),
    "mtp.1.hc_ffn_scale": ((3,), Storage.F32, None),
    "mtp.1.ffn.gate.weight": ((128, 5120), Storage.BF16, None),
    "mtp.1.ffn.gate.bias_vl": ((128,), Storage.F32, None),
    "mtp.2.ffn.experts.127.w1.weight": ((2304, 5120), Storage.FP4_ROWS, (2304, 160)),
    "mtp.2.ffn.experts.0.w2.weight": ((5120, 2304), Storage.FP4_ROWS, (5120, 72)),
    "mtp.2.ffn.shared_experts.w3.weight": ((2304, 5120), Storage.FP8_BLOCKS, (72, 160)),
    "mtp.0.main_proj.weight": ((5120, 15360), Storage.FP8_BLOCKS, (160, 480)),
    "mtp.0.main_norm.weight": ((5120,), Storage.BF16, None),
    "mtp.2.norm.weight": ((5120,), Storage.BF16, None),
    "mtp.2.markov_head.embed.weight": ((129280, 256), Storage.BF16, None),
    "mtp.2.markov_head.head.weight": ((129280, 256), Storage.BF16, None),
    "mtp.2.confidence_head.proj.weight": ((1, 5376), Storage.F32, None),
}
TARGET = {
    "embed.weight": ((129280, 5120), Storage.BF16, None),
    "layers.1.engram.embed.weight": ((384_006_168, 256), Storage.FP8_ROWS, (384_006_168, 8)),
    "layers.14.engram.embed.weight": ((384_016_682, 256), Storage.FP8_ROWS, (384_016_682, 8)),
    "layers.14.engram.wkv.weight": ((25600, 6144), Storage.FP8_BLOCKS, (800, 192)),
    "layers.14.engram.q_weight": ((4, 5120), Storage.BF16, None),
    "layers.8.attn.compressor.wgate.weight": ((512, 5120), Storage.F32, None),
    "layers.20.attn.compressor.wkv.weight": ((512, 5120), Storage.F32, None),
    "layers.20.attn.indexer.wk.weight": ((128, 512), Storage.BF16, None),
    "layers.36.attn.indexer.wq_b.weight": ((4096, 1280), Storage.FP8_BLOCKS, (128, 40)),
    "layers.36.attn.indexer.weights_proj.weight": ((32, 5120), Storage.BF16, None),
    "layers.39.ffn.experts.383.w2.weight": ((5120, 2304), Storage.FP4_ROWS, (5120, 72)),
    "vision.patch_embed.proj.weight": ((1024, 588), Storage.BF16, None),
    "vision.blocks.31.attn.wqkv.weight": ((3072, 1024), Storage.BF16, None),
    "vision.blocks.31.norm2.weight": ((1024,), Storage.F32, None),
    "aligner.w1.weight": ((5120, 9216), Storage.BF16, None),
    "image_newline": ((5120,), Storage.BF16, None),
}


@pytest.mark.parametrize("name", [*DRAFT, *TARGET])
def test_released_tensor(released_layout: dict[str, TensorSpec], name: str) -> None:
    shape, storage, scales = (DRAFT | TARGET)[name]
    spec = released_layout[name]
    assert (spec.shape, spec.storage) == (shape, storage)
    if scales is not None:
        assert spec.scale_shape == scales


def test_released_counts_and_sizes(released_layout: dict[str, TensorSpec]) -> None:
    patterns = Counter(re.sub(r"\d+", "N", name, count=1) for name in released_layout if "experts." not in name)
    assert patterns["layers.N.attn.compressor.wkv.weight"] == 4
    assert patterns["layers.N.attn.compressor.wgate.weight"] == 3
    assert patterns["layers.N.attn.indexer.wq_b.weight"] == 8
    assert patterns["layers.N.attn.indexer.wk.weight"] == 4
    assert patterns["layers.N.engram.embed.weight"] == 2
    assert patterns["mtp.N.main_proj.weight"] == patterns["mtp.N.norm.weight"] == 1
    routed = [name for name in released_layout if re.search(r"\.experts\.\d+\.", name)]
    assert len(routed) == 3 * (40 * 384 + 3 * 128)
    total = sum(spec.stored_bytes for spec in released_layout.values())
    tables = sum(spec.stored_bytes for name, spec in released_layout.items() if name.endswith("engram.embed.weight"))
    assert tables == 264 * (384_006_168 + 384_016_682)
    assert 505e9 < total < 515e9


@pytest.mark.parametrize(
    ("storage", "bytes_"),
    [
        (Storage.BF16, 12800),
        (Storage.F32, 25600),
        (Storage.FP8_BLOCKS, 6400 + 8),
        (Storage.FP8_ROWS, 6400 + 200),
        (Storage.FP4_ROWS, 3200 + 200),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_stored_bytes_count_scales(storage: Storage, bytes_: int) -> None:
    spec = TensorSpec((100, 64), storage)
    assert spec.stored_bytes == bytes_
    assert spec.storage.quantized == (storage not in (Storage.BF16, Storage.F32))


def test_parts_that_are_absent_have_no_tensors() -> None:
    layout = layout_of(small())
    assert not [name for name in layout if re.search(r"engram|vision|aligner|image_", name)]
    assert {name.split(".")[1] for name in layout if name.startswith("mtp.")} == {"0"}
    assert "mtp.0.main_norm.weight" in layout
    assert "mtp.0.norm.weight" in layout, "the only stage is the first and the last"
    assert layout["layers.0.hc_attn_fn"].shape == (2 + 2 + 4, 2 * 160)
    assert layout["layers.1.attn.wo_a.weight"].shape == (3 * 20, 2 * 96)
    assert layout["layers.1.attn.wq_a.weight"].scale_shape == (2, 5)
    assert "layers.2.attn.indexer.wq_b.weight" in layout
    assert "layers.2.attn.indexer.wk.weight" not in layout
    assert "layers.4.attn.compressor.wgate.weight" not in layout


def test_no_drafter_has_no_draft_tensors() -> None:
    config = edited(golden(), num_nextn_predict_layers=0, compress_ratios=[0, 0, 2, 2, 1, 1, 1, 1])
    layout = layout_of(config)
    assert not [name for name in layout if name.startswith("mtp.")]
    assert set(layout) == {name for name in layout_of(golden()) if not name.startswith("mtp.")}


def test_head_is_written_as_asked() -> None:
    assert layout_of(golden())["head.weight"].storage is Storage.F32
    assert layout_of(golden(), Storage.BF16)["head.weight"].storage is Storage.BF16


def test_scales_lie_beside_their_weights() -> None:
    assert scale_name("layers.0.attn.wkv.weight") == "layers.0.attn.wkv.scale"
    layout = layout_of(golden())
    assert not set(layout) & {scale_name(name) for name, spec in layout.items() if spec.storage.quantized}
    assert all(math.prod(spec.shape) > 0 for spec in layout.values())
