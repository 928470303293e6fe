"""The same requests get the same tokens however they are run."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_device import VOCABULARY
from scheduler_harness import Harness

from deepinfer.engine.scheduler import SchedulerLimits


def prompts(seed: int, count: int = 12) -> list[list[int]]:
    draw = random.Random(seed)
    stem = [draw.randrange(VOCABULARY) for _ in range(24)]
    return [stem[: draw.randrange(25)] + [draw.randrange(VOCABULARY) for _ in range(9)] for _ in range(count)]


def answers(seed: int, ahead: int, slots: int, chunk: int | None, pages: int, **settings: object) -> list[list[int]]:
    """Run the prompts of `seed`, checking every row, and return what each generated."""
    limits = SchedulerLimits(slots, slots + 20, chunk)
    harness = Harness(limits, pages=pages, **settings)
    ids = [harness.add(prompt, max_tokens=25, priority=index % 3) for index, prompt in enumerate(prompts(seed))]
    harness.drain(ahead)
    harness.answers = [harness.jobs[each].sequence.generated for each in ids]
    return harness


@pytest.mark.parametrize("ahead", [0, 1], ids=["plain", "asynchronous"])
@pytest.mark.parametrize("pages", [200, 16], ids=["room for all", "preemption"])
@pytest.mark.parametrize("chunk", [1, 7, 64, None], ids=lambda chunk: f"chunk {chunk}")
@pytest.mark.parametrize("mode", ["compact", "mask", "off"])
def test_every_way_gives_the_same_tokens(mode: str, chunk: int | None, pages: int, ahead: int):
    alone = answers(1, 0, 1, None, 200)
    harness = answers(1, ahead, 6, chunk, pages, mode=mode)
    assert harness.answers == alone.answers
    assert (harness.scheduler.statistics.preemptions > 0) == (pages == 16)


def test_overshoot_happens_in_the_asynchronous_loop_only():
    dropped = [answers(1, ahead, 6, None, 200).scheduler.statistics.dropped_rows for ahead in (0, 1)]
    assert dropped[0] == 0 < dropped[1]


def test_prefixes_are_shared():
    harness = answers(1, 1, 2, None, 200)
    assert harness.kv.statistics.hit_tokens > 50


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 99), st.integers(0, 1), st.integers(1, 6), st.integers(1, 30), st.integers(15, 60), st.integers(1, 4)
)
def test_any_way_gives_the_same_tokens(seed: int, ahead: int, slots: int, chunk: int, pages: int, half_page: int):
    alone = answers(seed, 0, 1, None, 200)
    assert answers(seed, ahead, slots, chunk, pages * 4 // half_page, page_size=2 * half_page).answers == alone.answers
