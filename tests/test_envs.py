"""The table of environment variables: defaults, values, and errors that say what would be accepted."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from deepinfer.config.envs import VARIABLES, Environment, describe_environment, read_environment
from deepinfer.core.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent

DEFAULTS = Environment(
    accelerator="cpu",
    model_dir=None,
    mtp_varlen=False,
    nextn=5,
    replay_mode="compact",
    replay_keep_tokens=None,
    batch_invariant=False,
    extra_experts=None,
    nodes=1,
    launcher=None,
    launcher_on_node=0,
    launchers_on_node=1,
    meeting_host="127.0.0.1",
    meeting_port=29500,
    agent_store=False,
    visible_devices=None,
    judge_base_url=None,
    judge_api_key=None,
    judge_model=None,
    ascend_launch_blocking=False,
    ascend_log_to_stdout=False,
)

GOOD = [
    ("DEEPINFER_ACCELERATOR", "nvidia", "accelerator", "nvidia"),
    ("DEEPINFER_ACCELERATOR", "ascend", "accelerator", "ascend"),
    ("DEEPINFER_HF_MODEL_DIR", "/models/flash", "model_dir", Path("/models/flash")),
    ("DEEPINFER_ENABLE_MTP_VARLEN", "1", "mtp_varlen", True),
    ("DEEPINFER_USE_NEXTN_DECODE", "0", "nextn", 0),
    ("DEEPINFER_USE_NEXTN_DECODE", "3", "nextn", 3),
    ("DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE", "mask", "replay_mode", "mask"),
    ("DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE", "off", "replay_mode", "off"),
    ("DEEPINFER_YOCO_PREFILL_KEEP_TOKENS", "140", "replay_keep_tokens", 140),
    ("DEEPINFER_BATCH_INVARIANT", "1", "batch_invariant", True),
    ("DEEPINFER_BATCH_INVARIANT", "0", "batch_invariant", False),
    ("DEEPINFER_OVERRIDE_NUM_EXTRA_EXPERTS", "0", "extra_experts", 0),
    ("DEEPINFER_OVERRIDE_NUM_EXTRA_EXPERTS", "32", "extra_experts", 32),
    ("WORLD_SIZE", "4", "nodes", 4),
    ("CUDA_VISIBLE_DEVICES", "0,3", "visible_devices", "0,3"),
    ("CUDA_VISIBLE_DEVICES", "", "visible_devices", ""),
    ("EVAL_JUDGE_BASE_URL", "https://judge.example/v1", "judge_base_url", "https://judge.example/v1"),
    ("EVAL_JUDGE_API_KEY", "abc", "judge_api_key", "abc"),
    ("EVAL_JUDGE_MODEL", "big", "judge_model", "big"),
    ("ASCEND_LAUNCH_BLOCKING", "1", "ascend_launch_blocking", True),
    ("ASCEND_SLOG_PRINT_TO_STDOUT", "1", "ascend_log_to_stdout", True),
]

BAD = [
    ("DEEPINFER_ACCELERATOR", "cuda", "one of cpu, nvidia, ascend"),
    ("DEEPINFER_ENABLE_MTP_VARLEN", "true", "0 or 1"),
    ("DEEPINFER_USE_NEXTN_DECODE", "-1", "an integer of at least 0"),
    ("DEEPINFER_USE_NEXTN_DECODE", "5.0", "an integer of at least 0"),
    ("DEEPINFER_USE_NEXTN_DECODE", "٥", "an integer of at least 0"),
    ("DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE", "COMPACT", "one of compact, mask, off"),
    ("DEEPINFER_YOCO_PREFILL_KEEP_TOKENS", "0", "an integer of at least 1"),
    ("DEEPINFER_BATCH_INVARIANT", "01", "0 or 1"),
    ("DEEPINFER_OVERRIDE_NUM_EXTRA_EXPERTS", "many", "an integer of at least 0"),
    ("WORLD_SIZE", "0", "an integer of at least 1"),
    ("EVAL_JUDGE_BASE_URL", "judge.example", "a URL that starts with http:// or https://"),
    ("ASCEND_LAUNCH_BLOCKING", "yes", "0 or 1"),
    ("ASCEND_SLOG_PRINT_TO_STDOUT", "2", "0 or 1"),
]


def test_defaults() -> None:
    assert read_environment({}) == DEFAULTS


@pytest.mark.parametrize(("name", "text", "attribute", "value"), GOOD, ids=[f"{n}={t}" for n, t, *_ in GOOD])
def test_a_value_is_read(name: str, text: str, attribute: str, value: Any) -> None:
    assert read_environment({name: text, "PATH": "/bin"}) == dataclasses.replace(DEFAULTS, **{attribute: value})


@pytest.mark.parametrize(("name", "text", "takes"), BAD, ids=[f"{n}={t}" for n, t, _ in BAD])
def test_a_bad_value_is_an_error_that_says_what_it_takes(name: str, text: str, takes: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name} takes {re.escape(takes)}, not {re.escape(repr(text))}: "):
        read_environment({name: text})


@pytest.mark.parametrize("name", [v.name for v in VARIABLES if v.kind.empty_is_unset])
def test_empty_is_unset(name: str) -> None:
    assert read_environment({name: ""}) == DEFAULTS


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("DEEPINFER_BATCH_INVARIANCE", "DEEPINFER_BATCH_INVARIANT"),
        ("DEEPINFER_MODEL_DIR", "DEEPINFER_HF_MODEL_DIR"),
        ("DEEPINFER_ACCELERATER", "DEEPINFER_ACCELERATOR"),
        ("EVAL_JUDGE_URL", "EVAL_JUDGE_BASE_URL"),
    ],
)
def test_an_unknown_name_is_an_error_with_a_suggestion(name: str, near: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name} is no variable of this project; did you mean {near}\\?"):
        read_environment({name: "1"})


def test_an_unknown_name_without_a_neighbour_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"^DEEPINFER_ZZZ is no variable .* it knows .*DEEPINFER_ACCELERATOR, "):
        read_environment({"DEEPINFER_ZZZ": ""})


def test_other_programs_variables_are_left_alone() -> None:
    assert read_environment({"MY_DEEPINFER_X": "1", "CUDA_HOME": "/x", "ASCEND_HOME_PATH": "/y"}) == DEFAULTS


def test_reads_the_process_environment_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
    monkeypatch.setenv("DEEPINFER_USE_NEXTN_DECODE", "2")
    assert read_environment() == dataclasses.replace(DEFAULTS, nextn=2)


def test_every_attribute_has_one_variable() -> None:
    attributes = [variable.attribute for variable in VARIABLES]
    assert sorted(attributes) == sorted(field.name for field in dataclasses.fields(Environment))
    assert len({variable.name for variable in VARIABLES}) == len(VARIABLES)


def test_description_shows_every_variable_with_its_default() -> None:
    text = describe_environment()
    for variable in VARIABLES:
        assert re.search(rf"^{variable.name} \({re.escape(variable.kind.takes)}; default ", text, re.MULTILINE)
        assert f"    {variable.help}\n" in text + "\n"
    assert "DEEPINFER_USE_NEXTN_DECODE (an integer of at least 0; default 5)" in text
    assert "DEEPINFER_BATCH_INVARIANT (0 or 1; default 0)" in text
    assert "DEEPINFER_ACCELERATOR (one of cpu, nvidia, ascend; default cpu)" in text
    assert "EVAL_JUDGE_MODEL (any text; default unset)" in text


def test_the_key_stays_out_of_the_representation() -> None:
    assert "hunter2" not in repr(read_environment({"EVAL_JUDGE_API_KEY": "hunter2"}))


def test_nothing_else_reads_the_environment() -> None:
    reading = re.compile(r"os\.(environ|getenv)|from os import .*(environ|getenv)")
    readers = [path for path in (ROOT / "deepinfer").rglob("*.py") if reading.search(path.read_text(encoding="utf-8"))]
    assert readers == [ROOT / "deepinfer" / "config" / "envs.py"]
