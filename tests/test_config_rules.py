"""Every rule of a model configuration: one edit of a valid file, one error that names the key and what it takes."""

import dataclasses
from typing import Any

import pytest
from released_config import ABSENT, edited, golden, released

from deepinfer.config.model import ModelConfig, VisionConfig
from deepinfer.core.errors import ConfigError

RATIOS = [0, 0, 2, 2, 1, 1, 1, 1, 0, 0]

BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "no text_config": ({"top__text_config": ABSENT}, "text_config is missing"),
    "text_config a list": ({"top__text_config": []}, r"text_config takes an object, not \[\]"),
    "vision_config a number": ({"top__vision_config": 3}, "vision_config takes an object, not 3"),
    "rope_scaling a string": ({"rope_scaling": "yarn"}, "rope_scaling takes an object"),
    "quantization_config a string": ({"top__quantization_config": "fp8"}, "quantization_config takes an object"),
    "tied embeddings": ({"top__tie_word_embeddings": True}, "tie_word_embeddings takes false"),
    "linear RoPE scaling": ({"rope__rope_type": "linear"}, "rope_type takes \"yarn\".*not 'linear'"),
    "old spelling of it": ({"rope__rope_type": ABSENT, "rope__type": "ntk"}, "rope_type takes \"yarn\".*not 'ntk'"),
    "another quantiser": ({"quantization__quant_method": "awq"}, "quant_method takes 'fp8', not 'awq'"),
    "another element": ({"quantization__fmt": "e5m2"}, "fmt takes 'e4m3', not 'e5m2'"),
    "another scale": ({"quantization__scale_fmt": "float"}, "scale_fmt takes 'ue8m0', not 'float'"),
    "another block": (
        {"quantization__weight_block_size": [128, 128]},
        r"weight_block_size takes \[32, 32\], not \[128, 128\]",
    ),
    "token outside": ({"top__bos_token_id": 476}, "bos_token_id = 476 is outside the vocabulary of 476 tokens"),
    "image token outside": ({"top__image_token_id": 999}, "image_token_id = 999 is outside the vocabulary"),
    "noise token outside": ({"dspark_noise_token_id": 476}, "dspark_noise_token_id = 476 is outside"),
    "engram pad outside": ({"engram_pad_token_id": 500}, "engram_pad_token_id = 500 is outside"),
    "no image token": ({"top__image_token_id": ABSENT}, "image_token_id is missing; .* vision_config needs it"),
    "two KV heads": ({"num_key_value_heads": 2}, "num_key_value_heads takes 1 .*, not 2"),
    "heads not in groups": ({"num_attention_heads": 5}, "num_attention_heads takes a multiple of 2 .o_groups., not 5"),
    "head_dim": ({"head_dim": 48}, "head_dim takes a multiple of 32 .*, not 48"),
    "index_head_dim": ({"index_head_dim": 40}, "index_head_dim takes a multiple of 32 .*, not 40"),
    "odd RoPE": ({"qk_rope_head_dim": 15}, "qk_rope_head_dim takes a multiple of 2 .*, not 15"),
    "RoPE wider than a head": ({"qk_rope_head_dim": 66}, "qk_rope_head_dim takes at most 32"),
    "RoPE wider than an index head": ({"qk_rope_head_dim": 34}, "qk_rope_head_dim takes at most 32 .*, not 34"),
    "too few ratios": ({"compress_ratios": RATIOS[:-1]}, r"compress_ratios takes 10 entries .*= 8.*= 2.*not 9"),
    "ratio 4": ({"compress_ratios": [0, 0, 2, 2, 4, 1, 1, 1, 0, 0]}, "compress_ratios takes the entries 0, 1 and 2"),
    "compressed draft": (
        {"compress_ratios": [*RATIOS[:-1], 1]},
        r"compress_ratios takes 0 for the draft stages, not \[0, 1\]",
    ),
    "no KV source": ({"kv_source_layer_ids": []}, "kv_source_layer_ids takes at least one layer id"),
    "unsorted KV sources": ({"kv_source_layer_ids": [4, 2]}, r"kv_source_layer_ids takes ascending .*not \[4, 2\]"),
    "repeated KV source": ({"kv_source_layer_ids": [2, 2, 4]}, "kv_source_layer_ids takes ascending layer ids without"),
    "KV source beyond": ({"kv_source_layer_ids": [2, 8]}, "kv_source_layer_ids names layer 8; .* layers 0 to 7"),
    "window-only KV source": (
        {"kv_source_layer_ids": [1, 2, 4], "index_source_layer_ids": [1, 2, 4, 6]},
        "kv_source_layer_ids names layer 1, whose ratio is 0",
    ),
    "window-only index source": (
        {"index_source_layer_ids": [0, 2, 4]},
        "index_source_layer_ids names layer 0, whose ratio is 0",
    ),
    "index source beyond": ({"index_source_layer_ids": [2, 4, 9]}, "index_source_layer_ids names layer 9"),
    "KV source that selects nothing": (
        {"index_source_layer_ids": [2, 6]},
        "layer 4 is in kv_source_layer_ids, so index_source_layer_ids must name it",
    ),
    "no source before": (
        {"compress_ratios": [0, 2, 2, 2, 1, 1, 1, 1, 0, 0]},
        "layer 1 has ratio 2 but no layer of kv_source_layer_ids stands at or before it",
    ),
    "source of another ratio": (
        {"compress_ratios": [0, 0, 2, 1, 1, 1, 1, 1, 0, 0]},
        "layer 3 has ratio 1, but the latest KV source at or before it, layer 2, has ratio 2",
    ),
    "candidate source without KV": (
        {"candidate_source_layer_id": 6},
        r"candidate_source_layer_id takes a KV source .\[2, 4\]. or -1, not 6",
    ),
    "no candidate blocks": ({"candidate_topk_blocks": 0}, "candidate_topk_blocks takes an integer of at least 1"),
    "two shared experts": ({"n_shared_experts": 2}, "n_shared_experts takes 1, not 2"),
    "more experts than there are": (
        {"num_experts_per_tok": 17},
        "num_experts_per_tok takes at most 16 .n_routed_experts., not 17",
    ),
    "softmax router": ({"scoring_func": "softmax"}, "scoring_func takes \"sqrtsoftplus\", not 'softmax'"),
    "greedy router": ({"topk_method": "greedy"}, "topk_method takes \"noaux_tc\", not 'greedy'"),
    "unnormalised router": ({"norm_topk_prob": False}, "norm_topk_prob takes true"),
    "hidden_size": ({"hidden_size": 100}, "hidden_size takes a multiple of 32 .*, not 100"),
    "moe_intermediate_size": ({"moe_intermediate_size": 72}, "moe_intermediate_size takes a multiple of 32"),
    "engram beyond": ({"engram_layer_ids": [1, 8]}, "engram_layer_ids names layer 8"),
    "unsorted engram": ({"engram_layer_ids": [3, 1]}, "engram_layer_ids takes ascending"),
    "one table for two layers": ({"engram_num_embeddings": [9999]}, "engram_num_embeddings takes 2 entries"),
    "no n-grams": ({"engram_max_ngram_size": 1}, "engram_max_ngram_size takes an integer of at least 2"),
    "no engram heads": ({"engram_n_heads": ABSENT}, "engram_n_heads takes an integer of at least 1 .*, not 0"),
    "engram_head_dim": ({"engram_head_dim": 24}, "engram_head_dim takes a multiple of 32"),
    "more classes than tokens": (
        {"engram_compressed_vocab_size": 477},
        "engram_compressed_vocab_size takes at most vocab_size = 476: 477",
    ),
    "table too small": ({"engram_num_embeddings": [1163, 2240]}, "engram_num_embeddings takes at least 1164 rows"),
    "no features": ({"dspark_target_layer_ids": []}, "dspark_target_layer_ids takes at least one layer id"),
    "feature beyond": ({"dspark_target_layer_ids": [6, 7, 8]}, "dspark_target_layer_ids names layer 8"),
    "no draft block": ({"dspark_block_size": 0}, "dspark_block_size takes an integer of at least 1"),
    "no draft experts": ({"dspark_n_routed_experts": ABSENT}, "dspark_n_routed_experts takes an integer of at least 1"),
    "too many draft experts": (
        {"dspark_num_experts_per_tok": 9},
        "dspark_num_experts_per_tok takes at most 8 .dspark_n_routed_experts., not 9",
    ),
    "vision heads": ({"vision__num_attention_heads": 5}, "vision_config: hidden_size takes a multiple of 20"),
    "no room for an image": ({"vision__max_image_tokens": 3}, "vision_config: max_image_tokens takes at least 4"),
}


@pytest.mark.parametrize(("changes", "message"), BROKEN.values(), ids=BROKEN)
def test_a_broken_rule_is_one_clear_error(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^here.json: .*{message}"):
        ModelConfig.from_dict(edited(golden(), **changes), "here.json")


REQUIRED = [
    field.name
    for field in dataclasses.fields(ModelConfig)
    if field.default is dataclasses.MISSING and not field.name.endswith("token_id")
]


@pytest.mark.parametrize("key", REQUIRED)
def test_a_missing_key_is_named(key: str) -> None:
    with pytest.raises(ConfigError, match=f"text_config: key {key} is missing; it takes (an?|true|a list) "):
        ModelConfig.from_dict(edited(golden(), **{key: ABSENT}), "here.json")


@pytest.mark.parametrize("key", ["bos_token_id", "eos_token_id", "pad_token_id"])
def test_a_missing_special_token_is_named(key: str) -> None:
    config = edited(golden(), **{key: ABSENT, f"top__{key}": ABSENT})
    with pytest.raises(ConfigError, match=f"key {key} is missing; it takes an integer of at least 0"):
        ModelConfig.from_dict(config, "here.json")


@pytest.mark.parametrize(
    "key", [field.name for field in dataclasses.fields(VisionConfig) if field.default is dataclasses.MISSING]
)
def test_a_missing_vision_key_is_named(key: str) -> None:
    with pytest.raises(ConfigError, match=f"vision_config: key {key} is missing; it takes an integer"):
        ModelConfig.from_dict(edited(golden(), **{f"vision__{key}": ABSENT}), "here.json")


@pytest.mark.parametrize("key", ["factor", "beta_fast", "beta_slow", "original_max_position_embeddings"])
def test_a_missing_rope_key_is_named(key: str) -> None:
    with pytest.raises(ConfigError, match=f"rope_scaling: key {key} is missing"):
        ModelConfig.from_dict(edited(golden(), **{f"rope__{key}": ABSENT}), "here.json")


WRONG = [
    ("hidden_size", "128", "an integer of at least 1, not '128'"),
    ("hidden_size", 128.0, "an integer of at least 1, not 128.0"),
    ("hidden_size", True, "an integer of at least 1, not True"),
    ("hidden_size", 0, "an integer of at least 1, not 0"),
    ("num_nextn_predict_layers", -1, "an integer of at least 0, not -1"),
    ("candidate_source_layer_id", -2, "an integer of at least -1, not -2"),
    ("rope_theta", "1e4", "a number above 0, not '1e4'"),
    ("rope_theta", float("inf"), "a number above 0, not inf"),
    ("rms_norm_eps", float("nan"), "a number of at least 0, not nan"),
    ("swiglu_limit", 0, "a number above 0, not 0"),
    ("scoring_func", 1, "a string, not 1"),
    ("norm_topk_prob", 1, "true or false, not 1"),
    ("compress_ratios", 2, "a list of integers of at least 0, not 2"),
    ("compress_ratios", [0, "2"], "a list of integers of at least 0, not"),
    ("compress_ratios", [0, -1], "a list of integers of at least 0, not"),
    ("kv_source_layer_ids", {"2": 4}, "a list of integers of at least 0, not"),
    ("engram_num_embeddings", [0, 5], "a list of integers of at least 1, not"),
]


@pytest.mark.parametrize(("key", "value", "takes"), WRONG, ids=[f"{key}={value!r}" for key, value, _ in WRONG])
def test_a_wrong_value_is_named(key: str, value: object, takes: str) -> None:
    for config in (golden(), released()):
        with pytest.raises(ConfigError, match=f"^here.json: text_config: {key} takes {takes}"):
            ModelConfig.from_dict(edited(config, **{key: value}), "here.json")


def test_a_wrong_vision_value_is_named() -> None:
    with pytest.raises(ConfigError, match=r"vision_config: max_wh_ratio takes a number above 0, not 0"):
        ModelConfig.from_dict(edited(golden(), vision__max_wh_ratio=0), "here.json")
