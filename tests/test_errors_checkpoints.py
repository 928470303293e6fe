"""Checkpoints and environments that will not do: `LLM` refuses with one error that says what, where and what would."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
from safetensors.torch import load_file, save_file

from deepinfer import LLM, CheckpointError, ConfigError, DeepInferError

INDEX = "model.safetensors.index.json"


@pytest.fixture
def copy(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_checkpoint, tmp_path / "copy")


def shard_of(directory: Path, tensor: str) -> Path:
    files: dict[str, str] = json.loads((directory / INDEX).read_text(encoding="utf-8"))["weight_map"]
    return directory / files[tensor]


def remove_weights(directory: Path) -> None:
    for path in directory.glob("*.safetensors"):
        path.unlink()


def cut_in_half(directory: Path) -> None:
    path = shard_of(directory, "head.weight")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def drop_tensor(directory: Path) -> None:
    path = shard_of(directory, "norm.weight")
    tensors = load_file(path)
    del tensors["norm.weight"]
    save_file(tensors, path)


def reshape_tensor(directory: Path) -> None:
    path = shard_of(directory, "norm.weight")
    tensors = load_file(path)
    tensors["norm.weight"] = tensors["norm.weight"][:-1].clone()
    save_file(tensors, path)


def other_tokenizer(directory: Path) -> None:
    """ "A" shares its class with "a"; in its place stands a piece that has a class of its own."""
    path = directory / "tokenizer.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    vocabulary: dict[str, int] = data["model"]["vocab"]
    vocabulary["AA"] = vocabulary.pop("A")
    path.write_text(json.dumps(data), encoding="utf-8")


def break_json(directory: Path) -> None:
    (directory / "config.json").write_text("{", encoding="utf-8")


def config(**keys: Any) -> Callable[[Path], None]:
    return lambda directory: tiny.edit_config(directory, **keys)


CASES: dict[str, tuple[Callable[[Path], None], type[DeepInferError], list[str]]] = {
    "no checkpoint": (shutil.rmtree, CheckpointError, ["copy", "no directory"]),
    "no config": (lambda d: (d / "config.json").unlink(), CheckpointError, ["copy", "config.json"]),
    "config no JSON": (break_json, ConfigError, ["config.json", "not valid JSON"]),
    "no index": (lambda d: (d / INDEX).unlink(), CheckpointError, ["copy", INDEX]),
    "no weights": (remove_weights, CheckpointError, ["model-00001", "safetensors"]),
    "half a shard": (cut_in_half, CheckpointError, ["model-00001", "safetensors"]),
    "a tensor missing": (drop_tensor, CheckpointError, ["norm.weight", "missing", "model-00001"]),
    "a tensor misshapen": (reshape_tensor, CheckpointError, ["norm.weight", "shape [63]", "takes [64]"]),
    "no tokenizer": (lambda d: (d / "tokenizer.json").unlink(), CheckpointError, ["tokenizer.json"]),
    "another tokenizer": (
        other_tokenizer,
        CheckpointError,
        ["Engram classes", "engram_compressed_vocab_size is", "tokenizer.json"],
    ),
    "more tokens than rows": (config(vocab_size=266), DeepInferError, ["vocab"]),
    "two KV heads": (config(num_key_value_heads=2), ConfigError, ["config.json", "num_key_value_heads"]),
    "source without index": (
        config(index_source_layer_ids=[1, 3]),
        ConfigError,
        ["config.json", "index_source_layer_ids"],
    ),
    "key missing": (config(hidden_size=None), ConfigError, ["config.json", "hidden_size"]),
}


@pytest.mark.parametrize("case", CASES)
def test_a_broken_checkpoint_is_refused(copy: Path, case: str) -> None:
    damage, kind, words = CASES[case]
    damage(copy)
    with pytest.raises(DeepInferError) as caught:
        LLM(copy)
    assert isinstance(caught.value, kind)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("DEEPINFER_YOCO_PREFILL_KEEP_TOKENS", "27", ["at least 28", "window of 16", "12 tokens of rollback"]),
        ("DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE", "half", ["compact, mask, off"]),
        ("DEEPINFER_ACCELERATOR", "tpu", ["cpu, nvidia, ascend"]),
        ("DEEPINFER_ACCELERATOR", "ascend", ["torch_npu", "DEEPINFER_ACCELERATOR=cpu"]),
        ("DEEPINFER_HF_MODEL_DIR", "/no/such/place", ["/no/such/place", "no directory"]),
        ("DEEPINFER_YOCO", "1", ["DEEPINFER_YOCO"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_environment_is_refused(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, words: list[str]
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(DeepInferError) as caught:
        LLM(None if name == "DEEPINFER_HF_MODEL_DIR" else tiny_checkpoint)
    assert all(word in str(caught.value) for word in [name, *words]), str(caught.value)


def test_a_name_that_is_no_directory_says_what_would_do() -> None:
    with pytest.raises(CheckpointError, match=r"no-such-dir.*DEEPINFER_HF_MODEL_DIR"):
        LLM("no-such-dir")
