"""Which model a command is about."""

from dataclasses import dataclass
from pathlib import Path

import torch

from deepinfer.checkpoint.layout import Storage, TensorSpec, tensor_layout
from deepinfer.checkpoint.locate import resolve_model
from deepinfer.checkpoint.reader import CONFIG_FILE, Checkpoint
from deepinfer.config.model import ModelConfig
from deepinfer.config.released import RELEASED, released_config
from deepinfer.core.errors import CheckpointError

MODEL_HELP = (
    f"a checkpoint's directory or name, or `{RELEASED}` for the released model's shape, which needs no weights "
    "(default: DEEPINFER_HF_MODEL_DIR, else the bundled checkpoint)"
)


@dataclass(frozen=True)
class NamedModel:
    """A configuration, what to call it, and where its weights lie (None: it is a shape only)."""

    title: str
    config: ModelConfig
    directory: Path | None

    def layout(self) -> dict[str, TensorSpec]:
        """Every tensor of the model; the released head is BF16, that of a checkpoint is as it lies there."""
        return tensor_layout(self.config, Storage.BF16 if self.directory is None else _stored_head(self.directory))


def find_model(name: str | None) -> NamedModel:
    """Find the model called `name`; only its configuration is read. Raises CheckpointError or ConfigError."""
    if name == RELEASED and not Path(name).exists():
        return NamedModel("released shape of DeepSeek-V4.1-Flash", released_config(), None)
    directory = resolve_model(name)
    return NamedModel(str(directory), ModelConfig.from_file(directory / CONFIG_FILE), directory)


def _stored_head(directory: Path) -> Storage:
    try:
        head, _ = Checkpoint(directory).load_raw("head.weight")
    except CheckpointError:  # not complete: the layout alone can still be shown
        return Storage.F32
    return Storage.BF16 if head.dtype == torch.bfloat16 else Storage.F32
