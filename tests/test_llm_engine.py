"""The parts of the generation loop: choosing and packing a batch, ending a sequence, where replay starts, devices."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

from deepinfer.config.envs import read_environment
from deepinfer.config.model import ModelConfig
from deepinfer.core.errors import ConfigError
from deepinfer.core.request import TEXT, Request
from deepinfer.core.sampling_params import SamplingParams
from deepinfer.engine.batch import Batch, BatchLimits, choose, pack
from deepinfer.engine.device import select_device
from deepinfer.engine.loop import run_to_end
from deepinfer.engine.replay import ReplayPolicy
from deepinfer.engine.sequence import Sequence
from deepinfer.text.images import ImageInput, image_types, plan_grid, preprocess

CPU = torch.device("cpu")


def sequence(length: int, index: int = 0, most: int = 4, replay_start: int = 0) -> Sequence:
    request = Request(index, None, tuple(range(10, 10 + length)), (TEXT,) * length, (), SamplingParams(0), 0)
    return Sequence(request, replay_start, {1}, most)


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12), rows=st.integers(1, 6), tokens=st.integers(1, 120)
)
def test_a_chosen_batch_keeps_the_limits_and_the_oldest(lengths: list[int], rows: int, tokens: int) -> None:
    waiting = [sequence(length, index) for index, length in enumerate(lengths)]
    chosen = choose(waiting, BatchLimits(rows, tokens))
    indices = [row.request.index for row in chosen]
    assert indices[0] == 0
    assert indices == sorted(indices)
    assert 1 <= len(chosen) <= rows
    padded = len(chosen) * max(row.length for row in chosen)
    assert padded <= tokens or len(chosen) == 1
    if len(chosen) < rows:  # whoever was left out would not have fitted
        for left in (row for row in waiting if row.request.index not in indices):
            longest = max(left.length, *(row.length for row in chosen if row.request.index < left.request.index))
            earlier = sum(row.request.index < left.request.index for row in chosen)
            assert (earlier + 1) * longest > tokens


def test_a_packed_batch_pads_on_the_right_and_points_at_the_newest_tokens() -> None:
    first, second = sequence(2, 0, replay_start=1), sequence(4, 1)
    first.append(77)
    batch = pack([first, second], pad_token=9, device=CPU)
    assert batch.ids.tolist() == [[10, 11, 77, 9], [10, 11, 12, 13]]
    assert (batch.types == TEXT).all()
    assert batch.last.tolist() == [2, 3]
    assert batch.replay_start.tolist() == [1, 0]
    assert (batch.ids.dtype, batch.types.dtype, batch.last.dtype) == (torch.int64, torch.int8, torch.int64)


def test_image_types_and_patches_follow_their_rows(tiny_checkpoint: Path) -> None:
    vision = ModelConfig.from_file(tiny_checkpoint / "config.json").vision
    assert vision is not None
    image: ImageInput = preprocess(Image.new("RGB", (30, 20)), vision)
    types = (TEXT, *image_types(plan_grid(30, 20, vision)))
    request = Request(1, None, (5,) * len(types), types, (image,), SamplingParams(0), 0)
    batch = pack([sequence(3), Sequence(request, 0, {1}, 4)], pad_token=0, device=CPU)
    assert batch.types[0].tolist() == [TEXT] * len(types)
    assert batch.types[1].tolist() == list(types)
    assert batch.images == (image,)


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


def test_the_loop_lets_waiting_sequences_in_as_others_end() -> None:
    """A stand-in model answers with a row's length; sequences of different limits share two places."""
    seen: list[list[int]] = []

    def runner(batch: Batch) -> Tensor:
        return torch.nn.functional.one_hot(batch.last + 1, 64).float()

    rows = [sequence(3, 0, most=1), sequence(5, 1, most=3), sequence(7, 2, most=2)]
    run_to_end(rows, runner, 0, CPU, BatchLimits(2, 100), lambda step: seen.append([r.request.index for r in step]))
    assert seen == [[0, 1], [1, 2], [1, 2]]
    assert [row.generated for row in rows] == [[3], [5, 6, 7], [7, 8]]


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
    assert select_device("cpu") == CPU


@pytest.mark.skipif(torch.cuda.is_available(), reason="only where there is no GPU")
def test_an_absent_gpu_is_told_of() -> None:
    with pytest.raises(ConfigError, match=r"torch finds no GPU.*DEEPINFER_ACCELERATOR=cpu"):
        select_device("nvidia")
