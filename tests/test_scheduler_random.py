"""Thousands of random steps: whatever happens to whom, every request gets its own tokens and ends exactly once."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_device import VOCABULARY
from scheduler_harness import Harness

from deepinfer.core.errors import RequestError
from deepinfer.engine.scheduler import SchedulerLimits


def random_harness(draw: random.Random) -> Harness:
    slots = draw.choice([1, 2, 3, 5, 8])
    limits = SchedulerLimits(
        max_num_seqs=slots,
        max_num_batched_tokens=slots + draw.choice([0, 1, 3, 16, 100]),
        max_chunk=draw.choice([None, 1, 2, 5, 7]),
        ageing_steps=draw.choice([1, 5, 50]),
        prefix_hits=draw.random() < 0.8,
        drafts=draw.choice([0, 0, 1, 2, 4, 5, 8]),
    )
    window = draw.choice([2, 4, 5])
    return Harness(
        limits,
        pages=draw.choice([3, 5, 8, 20, 60]),
        page_size=draw.choice([2, 4, 8]),
        window=window,
        mode=draw.choice(["compact", "compact", "mask", "off"]),
        keep=window + draw.choice([0, 1, 6]),
        host_pages=draw.choice([0, 3, 30]),
        errs=draw.choice([0, 1, 2, 3, 9]),
        variable=draw.random() < 0.5,
    )


def random_prompt(draw: random.Random, harness: Harness, stems: list[list[int]]) -> list[int]:
    """A prompt that often begins like another one, at times one that fits no cache."""
    stem = draw.choice(stems)
    tail = [draw.randrange(VOCABULARY) for _ in range(draw.choice([1, 1, 3, 9]))]
    return stem[: draw.randrange(len(stem) + 1)] + tail


def random_life(seed: int, actions: int, faults: bool) -> Harness:
    """Add, cancel, launch, land and break in random order, then let everything end."""
    draw = random.Random(seed)
    harness = random_harness(draw)
    stems = [[draw.randrange(VOCABULARY) for _ in range(draw.choice([8, 30, 60]))] for _ in range(3)]
    capacity = harness.pages * harness.page_size
    for _ in range(actions):
        action = draw.random()
        if action < 0.25:
            prompt = random_prompt(draw, harness, stems)
            if len(prompt) > capacity:
                with pytest.raises(RequestError):
                    harness.add(prompt)
            else:
                harness.add(prompt, draw.choice([1, 2, 7, 30, None]), draw.choice([0, 0, 0, 1, -2, 5]))
        elif action < 0.30 and harness.requests:
            harness.cancel(draw.choice(list(harness.requests)))
        elif action < 0.75:
            if len(harness.results) < 2:
                harness.launch(broken=faults and draw.random() < 0.1)
        elif harness.results:
            ids = [span.request_id for span in harness.results[0][0].spans]
            harness.land(draw.choice([None, ids[:1], ids[::2]]))
    while harness.results:
        harness.land()
    harness.drain(ahead=draw.choice([0, 1]))
    return harness


@pytest.mark.parametrize("faults", [False, True], ids=["sound", "faults"])
@pytest.mark.parametrize("block", range(4))
def test_random_lives(block: int, faults: bool) -> None:
    lives = [random_life(seed, 120, faults) for seed in range(block * 50, block * 50 + 50)]
    assert sum(life.kv.statistics.hit_tokens for life in lives) > 500
    assert sum(life.loads for life in lives) > 30
    assert sum(life.device.accepted for life in lives) > 500
    totals = [life.scheduler.statistics for life in lives]
    assert sum(total.steps for total in totals) > 2000
    assert sum(total.preemptions for total in totals) > 30
    assert sum(total.dropped_rows for total in totals) > 10
    assert sum(total.finished for total in totals) > 500
    assert (sum(total.failed for total in totals) > 20) == faults


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 60), st.booleans())
def test_any_life(seed: int, actions: int, faults: bool) -> None:
    random_life(seed, actions, faults)
