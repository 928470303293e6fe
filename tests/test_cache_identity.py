"""The name of a model in the cache: the same for copies, another for anything that changes what pages hold."""

import json
import shutil
from pathlib import Path

import pytest

from deepinfer.cache.identity import cache_identity
from deepinfer.cache.layout import CacheLayout
from deepinfer.checkpoint import identity
from deepinfer.config.model import ModelConfig
from deepinfer.core.errors import CheckpointError


@pytest.fixture
def copy(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_checkpoint, tmp_path / "copy")


def name(directory: Path, page_size: int = 64, compute: str = "float32") -> str:
    layout = CacheLayout.from_config(ModelConfig.from_file(directory / "config.json"))
    return cache_identity(directory, layout, page_size, compute)


def test_a_copy_is_the_same_model(tiny_checkpoint: Path, copy: Path) -> None:
    (copy / "README.md").write_text("a note")
    assert name(copy) == name(tiny_checkpoint)


def test_page_size_and_type_of_computation_matter(copy: Path) -> None:
    assert len({name(copy), name(copy, page_size=32), name(copy, compute="bfloat16")}) == 3


def change_weights(directory: Path) -> None:
    path = sorted(directory.glob("*.safetensors"))[-1]
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def rename_weights(directory: Path) -> None:
    path = sorted(directory.glob("*.safetensors"))[-1]
    path.rename(directory / "other.safetensors")


def change_config(directory: Path) -> None:
    path = directory / "config.json"
    data = json.loads(path.read_text())
    data["text_config"]["rope_theta"] = 20000.0
    path.write_text(json.dumps(data))


def change_tokenizer(directory: Path) -> None:
    path = directory / "tokenizer.json"
    path.write_text(path.read_text().replace("true", "false", 1))


@pytest.mark.parametrize("change", [change_weights, rename_weights, change_config, change_tokenizer])
def test_what_pages_depend_on_matters(change: object, copy: Path) -> None:
    before = name(copy)
    assert callable(change)
    change(copy)
    assert name(copy) != before


@pytest.mark.parametrize("at", [0, 50_000, 99_999])
def test_large_files_are_sampled(at: int, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "_WHOLE_BYTES", 1000)
    monkeypatch.setattr(identity, "_SAMPLES", 3)
    monkeypatch.setattr(identity, "_SAMPLE_BYTES", 100)
    path = copy / "more.safetensors"
    content = bytearray(100_000)
    path.write_bytes(content)
    before = name(copy)
    content[at] = 1
    path.write_bytes(content)
    assert name(copy) != before
    content[at], content[30_000] = 0, 1
    path.write_bytes(content)
    assert name(copy) == before, "only the samples are read"


def test_a_checkpoint_without_its_files_is_an_error(copy: Path) -> None:
    layout = CacheLayout.from_config(ModelConfig.from_file(copy / "config.json"))
    (copy / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"cannot be read to tell which model it is.*tokenizer\.json"):
        cache_identity(copy, layout, 64, "float32")
