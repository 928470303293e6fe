"""Reading the golden checkpoint, and every way in which a checkpoint can be half there or wrong."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from released_config import CHECKPOINT, edited, golden
from safetensors.torch import load_file, save_file

from deepinfer.checkpoint.formats import dequantize_fp4_rows, dequantize_fp8_blocks, dequantize_fp8_rows
from deepinfer.checkpoint.reader import Checkpoint
from deepinfer.core.errors import CheckpointError, ConfigError, DeepInferError

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def stored() -> dict[str, torch.Tensor]:
    """Every tensor on disk, by the safetensors package."""
    return load_file(CHECKPOINT / FIRST) | load_file(CHECKPOINT / SECOND)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A copy of the golden checkpoint to spoil."""
    return Path(shutil.copytree(CHECKPOINT, tmp_path / "model"))


def rewrite(directory: Path, file: str, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(directory / file)
    change(tensors)
    (directory / file).unlink()  # the loaded tensors may be views of the old file
    save_file(tensors, directory / file)


def edit_index(directory: Path, change: Callable[[dict[str, str]], object]) -> None:
    index = json.loads((directory / INDEX).read_text())
    change(index["weight_map"])
    (directory / INDEX).write_text(json.dumps(index))


def test_golden_checkpoint_is_whole() -> None:
    checkpoint = Checkpoint(CHECKPOINT)
    checkpoint.check()
    assert checkpoint.directory == CHECKPOINT
    assert checkpoint.config.num_hidden_layers == 8


def test_every_tensor_loads_dequantised(stored: dict[str, torch.Tensor]) -> None:
    checkpoint = Checkpoint(str(CHECKPOINT))
    for name, spec in checkpoint.layout.items():
        value = checkpoint.load(name)
        assert value.dtype == torch.float32
        assert tuple(value.shape) == spec.shape
        assert bool(value.isfinite().all())
        scale = stored.get(name.removesuffix("weight") + "scale")
        if stored[name].dtype == torch.int8:
            expected = dequantize_fp4_rows(stored[name], scale)
        elif "engram.embed" in name:
            expected = dequantize_fp8_rows(stored[name], scale)
        elif scale is not None:
            expected = dequantize_fp8_blocks(stored[name], scale)
        else:
            expected = stored[name].float()
        assert torch.equal(value, expected), name


def test_load_in_another_dtype_and_owned_by_the_caller() -> None:
    checkpoint = Checkpoint(CHECKPOINT)
    for name in ("norm.weight", "head.weight", "layers.0.attn.wkv.weight"):
        value = checkpoint.load(name, torch.bfloat16)
        assert torch.equal(value, checkpoint.load(name).bfloat16())
    for name, dtype in (("norm.weight", torch.bfloat16), ("head.weight", torch.float32)):
        checkpoint.load(name, dtype).zero_()
        assert checkpoint.load(name, dtype).abs().sum() > 0


def test_load_raw_is_what_lies_on_disk(stored: dict[str, torch.Tensor]) -> None:
    checkpoint = Checkpoint(CHECKPOINT)
    for name, spec in checkpoint.layout.items():
        tensor, scale = checkpoint.load_raw(name)
        assert tensor.dtype == stored[name].dtype
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), stored[name].reshape(-1).view(torch.uint8))
        assert (scale is not None) == spec.storage.quantized
        if scale is not None:
            expected = stored[name.removesuffix("weight") + "scale"]
            assert torch.equal(scale.view(torch.uint8), expected.view(torch.uint8))


def test_load_stacked() -> None:
    checkpoint = Checkpoint(CHECKPOINT)
    names = [f"layers.3.ffn.experts.{expert}.w2.weight" for expert in (5, 0, 11)]
    stacked = checkpoint.load_stacked(names, torch.bfloat16)
    assert stacked.shape == (3, 128, 64)
    for row, name in zip(stacked, names, strict=True):
        assert torch.equal(row, checkpoint.load(name, torch.bfloat16))


def test_only_the_shard_that_is_asked_for_is_opened(directory: Path) -> None:
    (directory / SECOND).write_bytes(b"broken")
    checkpoint = Checkpoint(directory)
    assert checkpoint.load("norm.weight").shape == (128,)
    with pytest.raises(CheckpointError, match=SECOND):
        checkpoint.load("mtp.0.main_norm.weight")


def test_a_single_file_needs_no_index(directory: Path, stored: dict[str, torch.Tensor]) -> None:
    for file in (FIRST, SECOND, INDEX):
        (directory / file).unlink()
    save_file(stored, directory / "model.safetensors")
    checkpoint = Checkpoint(directory)
    checkpoint.check()
    assert torch.equal(checkpoint.load("norm.weight"), stored["norm.weight"].float())
    rewrite(directory, "model.safetensors", lambda tensors: tensors.pop("norm.weight"))
    with pytest.raises(CheckpointError, match=r"tensor norm.weight is missing from model.safetensors"):
        Checkpoint(directory).check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["head.weight", "norm.weight", "layers.0.hc_attn_fn", "vision.norm.weight"])
def test_plain_tensors_are_read_as_stored(directory: Path, name: str, dtype: torch.dtype) -> None:
    rewrite(directory, FIRST, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
    checkpoint = Checkpoint(directory)
    checkpoint.check()
    assert checkpoint.load_raw(name)[0].dtype == dtype
    assert torch.equal(checkpoint.load(name), Checkpoint(CHECKPOINT).load(name).to(dtype).float())


def test_a_name_that_no_model_has() -> None:
    with pytest.raises(CheckpointError, match=r"a model of this configuration has no tensor layers.8.attn.wkv.weight"):
        Checkpoint(CHECKPOINT).load("layers.8.attn.wkv.weight")


def fails(directory: Path, *messages: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(directory).check()
    for message in (str(directory), *messages):
        assert message in str(caught.value)


def test_missing_tensor_is_named(directory: Path) -> None:
    rewrite(directory, FIRST, lambda tensors: tensors.pop("layers.2.attn.compressor.wgate.weight"))
    fails(directory, f"tensor layers.2.attn.compressor.wgate.weight is missing from {FIRST}, where the index puts it")
    edit_index(directory, lambda files: files.pop("layers.2.attn.compressor.wgate.weight"))
    fails(directory, f"tensor layers.2.attn.compressor.wgate.weight is missing from {INDEX}")


def test_missing_scale_is_named(directory: Path) -> None:
    edit_index(directory, lambda files: files.pop("layers.0.ffn.experts.7.w3.scale"))
    rewrite(directory, SECOND, lambda tensors: tensors.pop("layers.0.ffn.experts.7.w3.scale"))
    fails(directory, f"tensor layers.0.ffn.experts.7.w3.scale is missing from {INDEX}")
    with pytest.raises(CheckpointError, match=r"layers.0.ffn.experts.7.w3.scale is missing"):
        Checkpoint(directory).load("layers.0.ffn.experts.7.w3.weight")


def test_unexpected_tensor_is_named(directory: Path) -> None:
    rewrite(directory, FIRST, lambda tensors: tensors.update({"layers.0.attn.k_proj": torch.zeros(2)}))
    fails(directory, f"unexpected tensor layers.0.attn.k_proj in {FIRST}, which the index does not list there")
    edit_index(directory, lambda files: files.update({"layers.0.attn.k_proj": FIRST}))
    fails(directory, f"unexpected tensor layers.0.attn.k_proj in {FIRST}")


def test_a_tensor_in_two_shards_is_unexpected_in_one(directory: Path) -> None:
    rewrite(directory, SECOND, lambda tensors: tensors.update({"norm.weight": torch.zeros(128)}))
    fails(directory, f"unexpected tensor norm.weight in {SECOND}, which the index does not list there")


def test_misshapen_tensor_is_named(directory: Path) -> None:
    rewrite(directory, FIRST, lambda tensors: tensors.update({"norm.weight": torch.zeros(127)}))
    fails(directory, f"tensor norm.weight in {FIRST} has shape [127]; the configuration takes [128]")
    with pytest.raises(CheckpointError, match=r"norm.weight in .* has shape \[127\]"):
        Checkpoint(directory).load("norm.weight")


def test_misshapen_scale_is_named(directory: Path) -> None:
    def transpose(tensors: dict[str, torch.Tensor]) -> None:
        tensors["layers.0.attn.wq_a.scale"] = (
            tensors["layers.0.attn.wq_a.scale"].view(torch.uint8).T.contiguous().view(torch.float8_e8m0fnu)
        )

    rewrite(directory, FIRST, transpose)
    fails(directory, f"tensor layers.0.attn.wq_a.scale in {FIRST} has shape [4, 2]; the configuration takes [2, 4]")


@pytest.mark.parametrize(
    ("name", "dtype", "message"),
    [
        ("norm.weight", torch.float16, "has dtype F16; it takes BF16 or F32"),
        ("layers.0.attn.wkv.weight", torch.bfloat16, "has dtype BF16; it takes F8_E4M3"),
        ("layers.0.attn.wkv.scale", torch.float32, "has dtype F32; it takes F8_E8M0"),
        ("layers.1.engram.embed.weight", torch.int8, "has dtype I8; it takes F8_E4M3"),
    ],
)
def test_a_wrong_dtype_is_named(directory: Path, name: str, dtype: torch.dtype, message: str) -> None:
    rewrite(directory, FIRST, lambda tensors: tensors.update({name: tensors[name].float().to(dtype)}))
    fails(directory, f"tensor {name} in {FIRST} {message}")


def test_many_problems_are_counted(directory: Path) -> None:
    def forget(tensors: dict[str, torch.Tensor]) -> None:
        for expert in range(9):
            del tensors[f"layers.0.ffn.experts.{expert}.w1.weight"]

    rewrite(directory, SECOND, forget)
    fails(directory, "tensor layers.0.ffn.experts.0.w1.weight is missing", "; and 4 more")


def test_the_configuration_decides(directory: Path) -> None:
    (directory / "config.json").write_text(json.dumps(edited(golden(), q_lora_rank=96)))
    fails(directory, "tensor layers.0.attn.wq_a.weight", "has shape [64, 128]; the configuration takes [96, 128]")


def remove(file: str) -> Callable[[Path], object]:
    return lambda directory: (directory / file).unlink()


def fill(file: str, content: str) -> Callable[[Path], object]:
    return lambda directory: (directory / file).write_text(content)


def truncate(directory: Path) -> None:
    data = (directory / FIRST).read_bytes()
    (directory / FIRST).write_bytes(data[: len(data) // 2])


def only_shards(directory: Path) -> None:
    (directory / INDEX).unlink()


HALF: dict[str, tuple[Callable[[Path], object], str]] = {
    "a shard is absent": (remove(SECOND), f"{SECOND}: cannot be read .No such file.*; the checkpoint is incomplete"),
    "a shard is cut": (truncate, f"{FIRST}: is cut short: its header describes \\d+ bytes, the file holds \\d+"),
    "a shard is a pointer": (fill(FIRST, "version https://git-lfs.github.com/spec/v1"), f"{FIRST}: is cut short or no"),
    "no config.json": (remove("config.json"), "holds no config.json; it is no checkpoint, or half of one"),
    "config.json cut": (fill("config.json", '{"text_config": {'), "config.json: is not valid JSON"),
    "no index": (only_shards, f"holds neither {INDEX} nor model.safetensors; weights are missing"),
    "index cut": (fill(INDEX, '{"weight_map": {'), f"{INDEX}: is broken; it takes a JSON object with a weight_map"),
    "index without map": (fill(INDEX, '{"metadata": {}}'), f"{INDEX}: is broken"),
    "index a list": (fill(INDEX, "[]"), f"{INDEX}: is broken"),
    "map a list": (fill(INDEX, '{"weight_map": ["a"]}'), f"{INDEX}: is broken"),
    "map leads elsewhere": (
        fill(INDEX, '{"weight_map": {"norm.weight": "../x.safetensors"}}'),
        f"{INDEX}: weight_map takes names of files beside it",
    ),
    "map of numbers": (fill(INDEX, '{"weight_map": {"a": 1}}'), f"{INDEX}: weight_map takes names of files"),
    "map empty": (fill(INDEX, '{"weight_map": {}}'), f"tensor embed.weight is missing from {INDEX}"),
}


@pytest.mark.parametrize(("spoil", "message"), HALF.values(), ids=HALF)
def test_half_a_checkpoint_is_one_error(directory: Path, spoil: Callable[[Path], object], message: str) -> None:
    spoil(directory)
    with pytest.raises(DeepInferError, match=f"^{directory}.*{message}"):
        Checkpoint(directory).check()


def test_no_directory_and_a_file_are_one_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"gone: does not exist; a checkpoint is a directory with a config.json"):
        Checkpoint(tmp_path / "gone")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file: is no directory"):
        Checkpoint(tmp_path / "file")


def test_a_configuration_that_breaks_a_rule_is_its_own_error(directory: Path) -> None:
    (directory / "config.json").write_text(json.dumps(edited(golden(), n_shared_experts=0)))
    with pytest.raises(
        ConfigError, match=r"config\.json: text_config: n_shared_experts takes an integer of at least 1"
    ):
        Checkpoint(directory)
