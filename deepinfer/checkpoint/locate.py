"""Finds the checkpoint that a user means: a directory, the bundled one, or a name in the Hugging Face cache."""

import re
from pathlib import Path

import deepinfer
from deepinfer.config.envs import read_environment
from deepinfer.core.errors import CheckpointError

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_ADVICE = "pass the directory of a checkpoint, or set DEEPINFER_HF_MODEL_DIR to it"


def bundled_checkpoint() -> Path:
    """Where the small trained checkpoint of the project's repository lies."""
    return Path(deepinfer.__file__).resolve().parent.parent / "checkpoints" / "mini"


def resolve_model(name: str | Path | None = None) -> Path:
    """The directory of the checkpoint called `name`.

    None means `DEEPINFER_HF_MODEL_DIR` or, where that is unset, the bundled checkpoint. A name such as
    `deepseek-ai/DeepSeek-V4.1-Flash-1017` that is no directory is looked up in the local Hugging Face cache; nothing
    is downloaded. Raises CheckpointError where there is nothing.
    """
    if name is None:
        return _default()
    if Path(name).is_dir():
        return Path(name)
    if isinstance(name, str) and not Path(name).exists() and _HUB_NAME.fullmatch(name):
        return _cached(name)
    raise CheckpointError(f"{name}: is no directory; {_ADVICE}")


def _default() -> Path:
    chosen = read_environment().model_dir
    if chosen is not None:
        if not chosen.is_dir():
            raise CheckpointError(f"DEEPINFER_HF_MODEL_DIR={chosen}: is no directory; it takes one with a checkpoint")
        return chosen
    if not bundled_checkpoint().is_dir():
        raise CheckpointError(f"{bundled_checkpoint()}: the bundled checkpoint is not there; {_ADVICE}")
    return bundled_checkpoint()


def _cached(name: str) -> Path:
    """The newest snapshot of repository `name` in the Hugging Face cache."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise CheckpointError(f"{name}: is no directory, and huggingface_hub is not installed; {_ADVICE}") from None
    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{name}: is no directory, and the Hugging Face cache holds no such model; fetch it with "
            f"`hf download {name}`, or {_ADVICE}"
        ) from error
