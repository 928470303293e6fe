"""A `config.json` of the released model's shape, and edits of configurations for tests."""

import copy
import json
from pathlib import Path
from typing import Any

from deepinfer.config.released import released_json

GOLDEN = Path(__file__).parent / "golden"
CHECKPOINT = GOLDEN / "checkpoint"

RELEASED = released_json()

ABSENT = object()
"""As a value of `edited`: remove the key."""


def released() -> dict[str, Any]:
    """A copy of the released configuration."""
    return copy.deepcopy(RELEASED)


def golden() -> dict[str, Any]:
    """The configuration of the golden checkpoint."""
    config: dict[str, Any] = json.loads((CHECKPOINT / "config.json").read_text())
    return config


def edited(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A copy of `config` with keys set or removed: `key` in text_config, `top__key` at the top, `vision__key`..."""
    config = copy.deepcopy(config)
    places = {"top": config, "vision": config["vision_config"], "quantization": config["quantization_config"]}
    places["rope"] = config["text_config"]["rope_scaling"]
    for name, value in changes.items():
        place, _, key = name.rpartition("__")
        target = places[place] if place else config["text_config"]
        if value is ABSENT:
            del target[key]
        else:
            target[key] = value
    return config


def small() -> dict[str, Any]:
    """Another valid model: odd widths, no vision, no Engram, no YaRN, one draft stage, candidates off."""
    config = edited(
        golden(),
        hidden_size=160,
        num_hidden_layers=7,
        num_attention_heads=6,
        o_groups=3,
        head_dim=96,
        q_lora_rank=50,
        o_lora_rank=20,
        compress_ratios=[0, 2, 2, 2, 1, 0, 1, 0],
        kv_source_layer_ids=[1, 3, 4],
        index_source_layer_ids=[1, 2, 3, 4],
        candidate_source_layer_id=-1,
        candidate_topk_blocks=-1,
        moe_intermediate_size=96,
        hc_mult=2,
        num_nextn_predict_layers=1,
        dspark_target_layer_ids=[2],
        dspark_block_size=3,
        rope_scaling=None,
    )
    for key in [key for key in config["text_config"] if key.startswith("engram_")]:
        del config["text_config"][key]
    del config["vision_config"], config["image_token_id"]
    return config
