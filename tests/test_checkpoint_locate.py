"""Which directory a model name means."""

import sys
from pathlib import Path

import pytest

import deepinfer
from deepinfer.checkpoint import locate
from deepinfer.checkpoint.locate import bundled_checkpoint, resolve_model
from deepinfer.core.errors import CheckpointError, ConfigError

RELEASED = "deepseek-ai/DeepSeek-V4.1-Flash-1017"


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No variable of ours, an empty Hugging Face cache, and another working directory."""
    monkeypatch.delenv("DEEPINFER_HF_MODEL_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    cache(monkeypatch, tmp_path / "hub")


def cache(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(directory))


def add_to_cache(directory: Path, name: str) -> Path:
    """A repository as the Hugging Face cache keeps it: a branch names a commit, the commit is a folder."""
    repository = directory / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / ("a1" * 20)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a1" * 20)
    return snapshot


def test_a_directory_is_itself(tmp_path: Path) -> None:
    (tmp_path / "models" / "mine").mkdir(parents=True)
    assert resolve_model(tmp_path / "models" / "mine") == tmp_path / "models" / "mine"
    assert resolve_model("models/mine") == Path("models/mine"), "a directory is preferred to a name of the same form"


def test_none_is_the_bundled_checkpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert bundled_checkpoint() == Path(deepinfer.__file__).resolve().parents[1] / "checkpoints" / "mini"
    monkeypatch.setattr(locate, "bundled_checkpoint", lambda: tmp_path)
    assert resolve_model(None) == resolve_model() == tmp_path


def test_none_without_the_bundled_checkpoint_says_what_would_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(locate, "bundled_checkpoint", lambda: tmp_path / "mini")
    with pytest.raises(CheckpointError, match=r"mini: the bundled checkpoint is not there; .*DEEPINFER_HF_MODEL_DIR"):
        resolve_model(None)


def test_the_variable_goes_before_the_bundled_checkpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DEEPINFER_HF_MODEL_DIR", str(tmp_path))
    assert resolve_model(None) == tmp_path
    monkeypatch.setenv("DEEPINFER_HF_MODEL_DIR", str(tmp_path / "gone"))
    with pytest.raises(CheckpointError, match=f"^DEEPINFER_HF_MODEL_DIR={tmp_path}/gone: is no directory"):
        resolve_model(None)


def test_the_variable_does_not_replace_an_explicit_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DEEPINFER_HF_MODEL_DIR", str(tmp_path))
    (tmp_path / "mine").mkdir()
    assert resolve_model(tmp_path / "mine") == tmp_path / "mine"


def test_a_bad_variable_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPINFER_MODEL", "x")
    with pytest.raises(ConfigError, match="DEEPINFER_MODEL is no variable of this project"):
        resolve_model(None)


def test_a_name_in_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    snapshot = add_to_cache(tmp_path / "hub", RELEASED)
    assert resolve_model(RELEASED) == snapshot


def test_a_name_that_is_not_in_the_cache_says_what_would_do() -> None:
    with pytest.raises(CheckpointError, match=rf"^{RELEASED}: is no directory, .*`hf download {RELEASED}`, or pass"):
        resolve_model(RELEASED)


def test_without_the_hub_package_a_name_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(CheckpointError, match="is no directory, and huggingface_hub is not installed"):
        resolve_model(RELEASED)


@pytest.mark.parametrize("name", ["/nowhere/model", "./model", "a/b/c", "model", "owner/na me"])
def test_what_is_neither_directory_nor_name(name: str) -> None:
    with pytest.raises(CheckpointError, match=r"is no directory"):
        resolve_model(name)


@pytest.mark.parametrize("name", ["owner/..", "-a/b", "a--b/c"])
def test_names_that_the_hub_does_not_take(name: str) -> None:
    with pytest.raises(CheckpointError, match=r"is no directory"):
        resolve_model(name)


def test_a_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "model.safetensors").write_text("")
    for name in ("a/model.safetensors", tmp_path / "a" / "model.safetensors"):
        with pytest.raises(CheckpointError, match=r"model\.safetensors: is no directory; pass the directory"):
            resolve_model(name)
