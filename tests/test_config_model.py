"""ModelConfig: what it takes from a config.json, and the schedules it derives."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from released_config import ABSENT, CHECKPOINT, edited, golden, released, small

from deepinfer.config.model import ModelConfig, RopeScaling, VisionConfig
from deepinfer.core.errors import ConfigError


def parse(config: dict) -> ModelConfig:
    return ModelConfig.from_dict(config, "config.json")


def test_golden_dimensions_come_from_the_file() -> None:
    config = ModelConfig.from_file(CHECKPOINT / "config.json")
    text = golden()["text_config"]
    for key, value in text.items():
        if key not in ("model_type", "rope_scaling", "dtype"):
            assert getattr(config, key) == (tuple(value) if isinstance(value, list) else value), key
    assert config.rope_scaling == RopeScaling(factor=16, beta_fast=32, beta_slow=1, original_max_position_embeddings=64)
    assert config.vision == VisionConfig(
        num_hidden_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        intermediate_size=96,
        patch_size=4,
        rope_theta=10000.0,
        downsample_ratio=2,
        max_image_tokens=64,
        min_pixels=256,
        max_wh_ratio=None,
    )
    assert (config.image_token_id, config.bos_token_id, config.eos_token_id, config.pad_token_id) == (4, 0, 1, 2)


def test_golden_schedules() -> None:
    config = parse(golden())
    layers = range(8)
    assert config.decoder_start == 4
    assert [config.ratio(layer) for layer in range(10)] == [0, 0, 2, 2, 1, 1, 1, 1, 0, 0]
    assert [config.kv_source(layer) for layer in layers] == [None, None, 2, 2, 4, 4, 4, 4]
    assert [config.index_source(layer) for layer in layers] == [None, None, 2, 2, 4, 4, 6, 6]
    assert [config.has_engram(layer) for layer in layers] == [layer in (1, 3) for layer in layers]
    assert [layer for layer in config.index_source_layer_ids if config.selects_candidates(layer)] == [6]
    assert config.candidates_enabled
    assert config.draft_stages == 2


def test_released_schedules() -> None:
    config = parse(released())
    assert config.decoder_start == 20
    assert [config.kv_source(layer) for layer in (1, 2, 7, 8, 13, 14, 19, 20, 39, 40)] == [
        *(None, 2, 2, 8, 8, 14, 14, 20, 20, None),
    ]
    assert [config.index_source(layer) for layer in (2, 19, 20, 23, 24, 39)] == [2, 14, 20, 20, 24, 36]
    assert [layer for layer in config.index_source_layer_ids if config.selects_candidates(layer)] == [24, 28, 32, 36]
    assert config.draft_stages == 3


def primes_from(start: int, count: int) -> list[int]:
    found: list[int] = []
    while len(found) < count:
        if all(start % divisor for divisor in range(2, int(start**0.5) + 1)):
            found.append(start)
        start += 1
    return found


def test_released_tables_hold_the_prime_sized_rows() -> None:
    """The fixture's row counts are what the hash needs: 3 n-gram sizes x 8 heads of successive primes a layer."""
    primes = primes_from(16_000_000, 48)
    assert parse(released()).engram_num_embeddings == (sum(primes[:24]), sum(primes[24:]))


def test_absent_parts() -> None:
    config = parse(small())
    assert config.vision is None
    assert config.image_token_id is None
    assert config.rope_scaling is None
    assert config.engram_layer_ids == ()
    assert not any(config.has_engram(layer) for layer in range(7))
    assert not config.candidates_enabled
    assert not any(config.selects_candidates(layer) for layer in range(7))
    assert config.draft_stages == 1
    assert [config.kv_source(layer) for layer in range(8)] == [None, 1, 1, 3, 4, None, 4, None]
    assert [config.index_source(layer) for layer in range(8)] == [None, 1, 2, 3, 4, None, 4, None]


ACCEPTED = {
    "only ratio 1": {
        "compress_ratios": [1] * 8 + [0, 0],
        "kv_source_layer_ids": [0],
        "index_source_layer_ids": [0, 3],
        "candidate_source_layer_id": 0,
    },
    "several ratio-2 sources, no ratio 1": {
        "compress_ratios": [2] * 8 + [0, 0],
        "kv_source_layer_ids": [0, 3, 5],
        "index_source_layer_ids": [0, 3, 5],
        "candidate_source_layer_id": 3,
    },
    "ratio 1 before ratio 2": {
        "compress_ratios": [1, 1, 2, 2, 1, 1, 1, 1, 0, 0],
        "kv_source_layer_ids": [0, 2, 4],
        "index_source_layer_ids": [0, 2, 4],
    },
    "candidates off by source": {"candidate_source_layer_id": -1},
    "candidates off by blocks": {"candidate_topk_blocks": -1},
    "candidate keys absent": {
        "candidate_source_layer_id": ABSENT,
        "candidate_topk_blocks": ABSENT,
        "candidate_block_size": ABSENT,
    },
    "no drafter": {"num_nextn_predict_layers": 0, "compress_ratios": [0, 0, 2, 2, 1, 1, 1, 1]},
    "no engram": {"engram_layer_ids": [], "engram_num_embeddings": []},
    "hidden not a power of two": {"hidden_size": 96 * 3},
    "ranks that fill no block": {"q_lora_rank": 33, "o_lora_rank": 7},
    "integers where numbers are taken": {"rope_theta": 10000, "swiglu_limit": 7, "hc_eps": 0},
    "null for an optional key": {"rope_scaling": None},
    "no quantization_config": {"top__quantization_config": ABSENT},
    "unknown keys": {"index_share_kv": True, "top__auto_map": {}, "vision__dropout": 0.1, "quantization__x": 1},
    "engram pad token defaults to the pad token": {"engram_pad_token_id": ABSENT},
    "special tokens only in text_config": {
        "top__bos_token_id": ABSENT,
        "top__eos_token_id": ABSENT,
        "top__pad_token_id": ABSENT,
        "top__image_token_id": ABSENT,
        "image_token_id": 9,
    },
    "an image ratio limit": {"vision__max_wh_ratio": 8},
}


@pytest.mark.parametrize("changes", ACCEPTED.values(), ids=ACCEPTED)
def test_accepts(changes: dict) -> None:
    config = parse(edited(golden(), **changes))
    for key, value in changes.items():
        if "__" not in key and value is not ABSENT and hasattr(config, key):
            assert getattr(config, key) == (tuple(value) if isinstance(value, list) else value)


def test_defaults_of_optional_keys() -> None:
    assert parse(edited(golden(), engram_pad_token_id=ABSENT)).engram_pad_token_id == 2
    assert parse(edited(golden(), vision__rope_theta=ABSENT)).vision.rope_theta == 10000.0
    assert parse(edited(golden(), vision__max_wh_ratio=8)).vision.max_wh_ratio == 8.0
    assert not parse(edited(golden(), candidate_source_layer_id=ABSENT)).candidates_enabled


def test_a_later_kv_source_does_not_use_earlier_candidates() -> None:
    changes = {
        "compress_ratios": [2, 2, 2, 2, 2, 2, 2, 2, 0, 0],
        "kv_source_layer_ids": [0, 4],
        "index_source_layer_ids": [0, 2, 4, 6],
        "candidate_source_layer_id": 0,
    }
    config = parse(edited(golden(), **changes))
    assert [layer for layer in config.index_source_layer_ids if config.selects_candidates(layer)] == [2]


@st.composite
def schedules(draw: st.DrawFn) -> dict:
    """Valid schedules: segments of one ratio, each begun by a KV source, with window-only layers sprinkled in."""
    ratios: list[int] = [0] * draw(st.integers(0, 2))
    kv: list[int] = []
    index: list[int] = []
    for _ in range(draw(st.integers(1, 4))):
        kv.append(len(ratios))
        index.append(len(ratios))
        ratio = draw(st.sampled_from([1, 2]))
        ratios.append(ratio)
        for _ in range(draw(st.integers(0, 3))):
            entry = draw(st.sampled_from([0, ratio]))
            if entry and draw(st.booleans()):
                index.append(len(ratios))
            ratios.append(entry)
    return {
        "num_hidden_layers": len(ratios),
        "compress_ratios": ratios,
        "kv_source_layer_ids": kv,
        "index_source_layer_ids": index,
        "candidate_source_layer_id": kv[-1],
        "num_nextn_predict_layers": 0,
        "engram_layer_ids": [],
    }


@given(schedules())
def test_sources_of_any_schedule(changes: dict) -> None:
    config = parse(edited(golden(), **changes))
    assert config.decoder_start == changes["kv_source_layer_ids"][-1]
    for layer in range(config.num_hidden_layers):
        source, index = config.kv_source(layer), config.index_source(layer)
        if config.ratio(layer) == 0:
            assert source is None
            assert index is None
            continue
        assert config.ratio(source) == config.ratio(layer)
        assert source <= index <= layer, "a selection never outlives the positions it was made over"
        assert index in config.index_source_layer_ids
        assert config.kv_source(index) == source


def test_the_file_is_named_in_errors(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(edited(golden(), n_shared_experts=2)))
    with pytest.raises(ConfigError, match=f"^{path}: n_shared_experts takes 1, not 2"):
        ModelConfig.from_file(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "is not valid JSON"), ("[1]", "takes a JSON object, not list"), ("\udcff", "is not valid JSON")],
    ids=["cut short", "a list", "not UTF-8"],
)
def test_files_that_are_no_configuration(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_file(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: cannot be read \(No such file"):
        ModelConfig.from_file(tmp_path / "config.json")
