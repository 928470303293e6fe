"""Writing: what is read back, shard sizes, atomicity, and what is refused."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from released_config import CHECKPOINT, edited, golden, small

from deepinfer.checkpoint import formats
from deepinfer.checkpoint.layout import Storage, TensorSpec, tensor_layout
from deepinfer.checkpoint.reader import Checkpoint
from deepinfer.checkpoint.writer import stored_form, write_checkpoint
from deepinfer.config.model import ModelConfig
from deepinfer.core.errors import CheckpointError, ConfigError

ROUND_TRIP = {
    Storage.BF16: lambda w: w.bfloat16().float(),
    Storage.F32: lambda w: w,
    Storage.FP8_BLOCKS: formats.fp8_blocks_round_trip,
    Storage.FP4_ROWS: formats.fp4_rows_round_trip,
    Storage.FP8_ROWS: formats.fp8_rows_round_trip,
}


def tiny() -> dict:
    """A configuration with few tensors, for tests that write many times."""
    return edited(
        golden(),
        num_hidden_layers=1,
        compress_ratios=[1, 0],
        kv_source_layer_ids=[0],
        index_source_layer_ids=[0],
        candidate_source_layer_id=0,
        n_routed_experts=3,
        num_nextn_predict_layers=1,
        dspark_target_layer_ids=[0],
        dspark_n_routed_experts=2,
        engram_layer_ids=[0],
        engram_num_embeddings=[1500],
    )


def random_tensors(config: dict) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    layout = tensor_layout(ModelConfig.from_dict(config, "config.json"))
    return {name: torch.randn(spec.shape, generator=generator) for name, spec in layout.items()}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def files_of(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


@pytest.mark.parametrize("config", [tiny(), small()], ids=["tiny", "small"])
def test_what_is_read_back_is_the_round_trip(tmp_path: Path, config: dict) -> None:
    tensors = random_tensors(config)
    write_checkpoint(tmp_path / "new" / "model", config, tensors)
    checkpoint = Checkpoint(tmp_path / "new" / "model")
    checkpoint.check()
    for name, spec in checkpoint.layout.items():
        assert same_bits(checkpoint.load(name), ROUND_TRIP[spec.storage](tensors[name])), name
        assert checkpoint.load_raw(name)[0].dtype == spec.stored_dtype


def test_golden_values_survive_rewriting(tmp_path: Path) -> None:
    source = Checkpoint(CHECKPOINT)
    write_checkpoint(tmp_path / "model", golden(), {name: source.load(name) for name in source.layout})
    copy = Checkpoint(tmp_path / "model")
    copy.check()
    for name in source.layout:
        assert same_bits(source.load(name), copy.load(name)), name


def test_golden_stored_form_survives_rewriting(tmp_path: Path) -> None:
    """Codes and scales passed as a pair are kept as they are; the rest of the files agrees too."""
    source = Checkpoint(CHECKPOINT)
    pairs = {}
    for name in source.layout:
        tensor, scale = source.load_raw(name)
        pairs[name] = tensor if scale is None else (tensor, scale)
    write_checkpoint(tmp_path / "model", golden(), pairs, extra_files=[CHECKPOINT / "tokenizer.json"])
    copy = Checkpoint(tmp_path / "model")
    for name in source.layout:
        for a, b in zip(source.load_raw(name), copy.load_raw(name), strict=True):
            assert (a is None and b is None) or same_bits(a, b), name
    index, expected = (
        json.loads((path / "model.safetensors.index.json").read_text()) for path in (tmp_path / "model", CHECKPOINT)
    )
    assert index["metadata"] == expected["metadata"]
    assert set(index["weight_map"]) == set(expected["weight_map"])
    assert json.loads((tmp_path / "model" / "config.json").read_text()) == golden()
    assert (tmp_path / "model" / "tokenizer.json").read_bytes() == (CHECKPOINT / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("limit", [260_000, 400_000, 10_000_000])
def test_no_shard_exceeds_the_limit(tmp_path: Path, limit: int) -> None:
    tensors = random_tensors(tiny())
    write_checkpoint(tmp_path / "model", tiny(), tensors, max_shard_bytes=limit)
    Checkpoint(tmp_path / "model").check()
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "model").glob("*.safetensors")}
    assert max(sizes.values()) <= limit
    assert len(sizes) >= sum(sizes.values()) / limit
    assert len(sizes) <= 2 * sum(sizes.values()) / limit + 1
    assert sorted(sizes) == [f"model-{n:05d}-of-{len(sizes):05d}.safetensors" for n in range(1, len(sizes) + 1)]


def test_a_tensor_larger_than_a_shard_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tensor embed.weight needs a shard of \d+ bytes; .* is 100000"):
        write_checkpoint(tmp_path / "model", tiny(), random_tensors(tiny()), max_shard_bytes=100_000)
    assert files_of(tmp_path) == set()


def test_head_in_bf16(tmp_path: Path) -> None:
    tensors = random_tensors(tiny())
    write_checkpoint(tmp_path / "model", tiny(), tensors, head=Storage.BF16)
    checkpoint = Checkpoint(tmp_path / "model")
    checkpoint.check()
    assert checkpoint.load_raw("head.weight")[0].dtype == torch.bfloat16
    assert torch.equal(checkpoint.load("head.weight"), tensors["head.weight"].bfloat16().float())


class Lazy(Mapping[str, torch.Tensor]):
    """Makes values when asked, and remembers what was asked for."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors, self.asked = tensors, []

    def __getitem__(self, name: str) -> torch.Tensor:
        self.asked.append(name)
        return self.tensors[name]

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


def test_values_may_be_made_when_asked(tmp_path: Path) -> None:
    lazy = Lazy(random_tensors(tiny()))
    write_checkpoint(tmp_path / "model", tiny(), lazy)
    assert sorted(lazy.asked) == sorted(lazy.tensors), "each is asked for once"


def test_parameters_views_and_other_dtypes_are_taken(tmp_path: Path) -> None:
    tensors = random_tensors(tiny())
    expected = dict(tensors)
    name, other = "layers.0.attn.wo_b.weight", "layers.0.attn.wkv.weight"
    tensors[name] = torch.nn.Parameter(tensors[name].T.contiguous().T)
    tensors[other] = tensors[other].double()
    tensors["layers.0.hc_attn_scale"] = tensors["layers.0.hc_ffn_scale"] = torch.ones(3)  # one storage, two names
    write_checkpoint(tmp_path / "model", tiny(), tensors)
    checkpoint = Checkpoint(tmp_path / "model")
    checkpoint.check()
    for key in (name, other):
        assert torch.equal(checkpoint.load(key), formats.fp8_blocks_round_trip(expected[key]))
    assert torch.equal(checkpoint.load("layers.0.hc_ffn_scale"), torch.ones(3))


def test_an_earlier_checkpoint_is_replaced_whole(tmp_path: Path) -> None:
    tensors = random_tensors(tiny())
    write_checkpoint(tmp_path / "model", tiny(), tensors, max_shard_bytes=260_000)
    tensors["norm.weight"] = torch.full((128,), 2.0)
    write_checkpoint(tmp_path / "model", tiny(), tensors)
    assert files_of(tmp_path) == {"model"}
    assert files_of(tmp_path / "model") == {
        "config.json",
        "model.safetensors.index.json",
        "model-00001-of-00001.safetensors",
    }
    assert torch.equal(Checkpoint(tmp_path / "model").load("norm.weight"), torch.full((128,), 2.0))


def test_a_failure_on_the_way_leaves_the_earlier_checkpoint(tmp_path: Path) -> None:
    tensors = random_tensors(tiny())
    write_checkpoint(tmp_path / "model", tiny(), tensors)
    broken = {**tensors, "norm.weight": torch.zeros(128), "mtp.0.norm.weight": torch.full((128,), torch.nan)}
    with pytest.raises(CheckpointError, match=r"mtp\.0\.norm\.weight holds NaN"):
        write_checkpoint(tmp_path / "model", tiny(), broken, max_shard_bytes=260_000)
    with pytest.raises(FileNotFoundError):
        write_checkpoint(tmp_path / "model", tiny(), tensors, extra_files=[tmp_path / "gone.json"])
    assert files_of(tmp_path) == {"model"}
    checkpoint = Checkpoint(tmp_path / "model")
    checkpoint.check()
    assert torch.equal(checkpoint.load("norm.weight"), tensors["norm.weight"].bfloat16().float())


def test_a_directory_that_is_no_checkpoint_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "thesis.txt").write_text("words")
    (tmp_path / "file").write_text("words")
    for name in ("model", "file"):
        with pytest.raises(CheckpointError, match="exists and is no checkpoint; it is not replaced"):
            write_checkpoint(tmp_path / name, tiny(), random_tensors(tiny()))
    assert files_of(tmp_path / "model") == {"thesis.txt"}
    (tmp_path / "empty").mkdir()
    write_checkpoint(tmp_path / "empty", tiny(), random_tensors(tiny()))
    Checkpoint(tmp_path / "empty").check()


def test_names_must_be_the_layouts(tmp_path: Path) -> None:
    tensors = random_tensors(tiny())
    with pytest.raises(
        CheckpointError, match=r"not written: tensor layers.0.attn_sink is none of this configuration's"
    ):
        write_checkpoint(tmp_path / "model", tiny(), {**tensors, "layers.0.attn_sink": torch.zeros(4)})
    del tensors["layers.0.ffn.gate.bias_vl"]
    with pytest.raises(CheckpointError, match=r"not written: tensor layers.0.ffn.gate.bias_vl is missing"):
        write_checkpoint(tmp_path / "model", tiny(), tensors)


def test_a_bad_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model/config.json to be written: n_shared_experts takes 1"):
        write_checkpoint(tmp_path / "model", edited(tiny(), n_shared_experts=2), random_tensors(tiny()))


FP8 = TensorSpec((64, 32), Storage.FP8_BLOCKS)


@pytest.mark.parametrize("storage", list(Storage), ids=lambda storage: storage.name)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf], ids=str)
def test_values_that_are_not_finite_are_refused_by_name(storage: Storage, value: float) -> None:
    w = torch.ones(64, 32)
    w[3, 4] = value
    with pytest.raises(CheckpointError, match=r"tensor a\.weight holds NaN or infinity"):
        stored_form("a.weight", TensorSpec((64, 32), storage), w)


def test_values_that_overflow_bf16_are_refused() -> None:
    w = torch.full((4,), 3.4e38)
    with pytest.raises(CheckpointError, match=r"holds NaN or infinity as torch\.bfloat16"):
        stored_form("a.weight", TensorSpec((4,), Storage.BF16), w)
    assert stored_form("a.weight", TensorSpec((4,), Storage.F32), w)["a.weight"].isfinite().all()


def test_a_wrong_shape_is_refused() -> None:
    with pytest.raises(
        CheckpointError, match=re.escape("tensor a.weight has shape [64, 33]; the configuration takes [64, 32]")
    ):
        stored_form("a.weight", FP8, torch.zeros(64, 33))


def test_a_wrong_pair_is_refused() -> None:
    q, scale = formats.quantize_fp8_blocks(torch.ones(64, 32))
    assert set(stored_form("a.weight", FP8, (q, scale))) == {"a.weight", "a.scale"}
    for pair in ((q[:32], scale), (q, scale[:1]), (q.view(torch.int8), scale), (q, scale.float())):
        with pytest.raises(CheckpointError, match=r"tensor a\.weight with scales takes dtypes and shapes"):
            stored_form("a.weight", FP8, pair)
    with pytest.raises(CheckpointError, match=r"takes plain values \(BF16\), not a pair"):
        stored_form("a.weight", TensorSpec((64, 32), Storage.BF16), (q, scale))


@pytest.mark.parametrize("part", [0, 1], ids=["code", "scale"])
def test_a_pair_with_nan_is_refused(part: int) -> None:
    pair = formats.quantize_fp8_blocks(torch.ones(64, 32))
    pair[part].view(torch.uint8)[1, 0] = 0xFF
    with pytest.raises(CheckpointError, match="holds NaN among its codes or scales"):
        stored_form("a.weight", FP8, pair)
