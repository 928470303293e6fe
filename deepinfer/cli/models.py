"""Which model a command is about."""

from dataclasses import dataclass
from pathlib import Path

from deepinfer.checkpoint.locate import resolve_model
from deepinfer.checkpoint.reader import CONFIG_FILE
from deepinfer.config.model import ModelConfig
from deepinfer.config.released import RELEASED, released_config

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


def find_model(name: str | None) -> NamedModel:
    """Find the model called `name`; only its configuration is read. Raises CheckpointError or ConfigError."""
    if name == RELEASED and not Path(name).exists():
        return NamedModel("released shape of DeepSeek-V4.1-Flash", released_config(), None)
    directory = resolve_model(name)
    return NamedModel(str(directory), ModelConfig.from_file(directory / CONFIG_FILE), directory)
