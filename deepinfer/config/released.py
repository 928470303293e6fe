"""The shape of the released model, which ships with the package: to plan for it without having its weights."""

import json
from importlib import resources
from typing import Any

from deepinfer.config.model import ModelConfig

RELEASED = "released"
"""What a user calls it instead of a checkpoint."""


def released_json() -> dict[str, Any]:
    """The released model's `config.json`, parsed; the caller's own copy.

    The vision tower's feed-forward width and pixel floor are not in the published description: plausible values.
    """
    text = resources.files("deepinfer.config").joinpath("released.json").read_text(encoding="utf-8")
    data: dict[str, Any] = json.loads(text)
    return data


def released_config() -> ModelConfig:
    """The released model's checked configuration."""
    return ModelConfig.from_dict(released_json(), RELEASED)
