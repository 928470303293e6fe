"""The small parts of the engine: ending a sequence, where replay starts, devices."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from deepinfer.config.envs import read_environment
from deepinfer.config.model import ModelConfig
from deepinfer.core.errors import ConfigError
from deepinfer.core.request import TEXT, Request
from deepinfer.core.sampling_params import SamplingParams
from deepinfer.engine.device import select_device
from deepinfer.engine.replay import ReplayPolicy
from deepinfer.engine.sequence import Sequence


def sequence(length: int, most: int = 4) -> Sequence:
    request = Request(0, None, tuple(range(10, 10 + length)), (TEXT,) * length, (), SamplingParams(0), 0)
    return Sequence(request, 0, {1}, most)


def test_a_sequence_ends_at_a_stop_token_or_at_its_limit() -> None:
    stopped, full = sequence(3), sequence(3, most=2)
    for token in (5, 1):
        assert stopped.finish_reason is None
        stopped.append(token)
    full.append(5)
    assert full.finish_reason is None
    full.append(6)
    assert (stopped.finish_reason, stopped.generated) == ("stop", [5, 1])
    assert (full.finish_reason, full.length) == ("length", 5)


def test_a_stop_token_in_the_last_place_counts_as_a_stop() -> None:
    row = sequence(3, most=1)
    row.append(1)
    assert row.finish_reason == "stop"


def test_replay_starts_where_the_kept_suffix_does(golden_checkpoint: Path) -> None:
    config = ModelConfig.from_file(golden_checkpoint / "config.json")
    policy = ReplayPolicy.choose(read_environment({}), config)
    assert policy == ReplayPolicy("compact", config.sliding_window + 12)
    assert [policy.start(length) for length in (1, 28, 29, 100)] == [0, 0, 1, 72]
    assert replace(policy, mode="off").start(100) == 0
    longer = read_environment(
        {"DEEPINFER_YOCO_PREFILL_KEEP_TOKENS": "50", "DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE": "mask"}
    )
    assert ReplayPolicy.choose(longer, config) == ReplayPolicy("mask", 50)


def test_the_cpu_is_always_there() -> None:
    assert select_device("cpu") == torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="only where there is no GPU")
def test_an_absent_gpu_is_told_of() -> None:
    with pytest.raises(ConfigError, match=r"torch finds no GPU.*DEEPINFER_ACCELERATOR=cpu"):
        select_device("nvidia")
