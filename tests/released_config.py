"""A `config.json` of the released model's shape, and edits of configurations for tests."""

import copy
import json
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).parent / "golden"
CHECKPOINT = GOLDEN / "checkpoint"

RELEASED: dict[str, Any] = {
    "architectures": ["DeepseekV41ForCausalLM"],
    "model_type": "deepseek_v41",
    "image_token_id": 129264,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "transformers_version": "5.9.0",
    "text_config": {
        "model_type": "deepseek_v41_text",
        "vocab_size": 129280,
        "hidden_size": 5120,
        "num_hidden_layers": 40,
        "max_position_embeddings": 1048576,
        "rms_norm_eps": 1e-20,
        "num_attention_heads": 64,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 1280,
        "o_lora_rank": 1024,
        "o_groups": 8,
        "sliding_window": 128,
        "rope_theta": 10000.0,
        "compress_rope_theta": 160000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "type": "yarn",
            "factor": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 65536,
        },
        "compress_ratios": [0] * 2 + [2] * 18 + [1] * 20 + [0] * 3,
        "kv_source_layer_ids": [2, 8, 14, 20],
        "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk": 512,
        "candidate_source_layer_id": 20,
        "candidate_topk_blocks": 2048,
        "candidate_block_size": 8,
        "moe_intermediate_size": 2304,
        "n_routed_experts": 384,
        "n_shared_experts": 1,
        "num_experts_per_tok": 6,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 10.0,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "engram_layer_ids": [1, 14],
        "engram_num_embeddings": [384_006_168, 384_016_682],
        "engram_max_ngram_size": 4,
        "engram_vocab_size": 16_000_000,
        "engram_n_heads": 8,
        "engram_head_dim": 256,
        "engram_pad_token_id": 2,
        "engram_compressed_vocab_size": 99092,
        "num_nextn_predict_layers": 3,
        "dspark_block_size": 5,
        "dspark_noise_token_id": 128799,
        "dspark_target_layer_ids": [37, 38, 39],
        "dspark_markov_rank": 256,
        "dspark_n_routed_experts": 128,
        "dspark_num_experts_per_tok": 3,
        "dtype": "bfloat16",
    },
    # The feed-forward width and the pixel floor are not published in the documents used here: plausible values.
    "vision_config": {
        "model_type": "deepseek_v41_vision",
        "num_hidden_layers": 32,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "intermediate_size": 2816,
        "patch_size": 14,
        "rope_theta": 10000.0,
        "downsample_ratio": 3,
        "max_image_tokens": 1024,
        "min_pixels": 295936,
    },
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "scale_fmt": "ue8m0",
        "weight_block_size": [32, 32],
    },
}

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
