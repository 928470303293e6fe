"""Bounded waiting while new requests never stop coming."""

import random

import pytest
from scheduler_device import VOCABULARY
from scheduler_harness import Harness

from deepinfer.engine.scheduler import SchedulerLimits


@pytest.mark.parametrize("ahead", [0, 1], ids=["plain", "asynchronous"])
@pytest.mark.parametrize("pages", [8, 40], ids=["few pages", "few slots"])
def test_waiting_is_bounded_under_more_load_than_can_be_served(pages: int, ahead: int):
    """With ageing of 20 steps and priorities 0 to 3, nobody starts before one who came over 60 steps sooner."""
    draw = random.Random(pages)
    harness = Harness(SchedulerLimits(4, 12, max_chunk=5, ageing_steps=20), pages=pages)
    for _ in range(800):
        prompt = [draw.randrange(1, VOCABULARY) for _ in range(draw.choice([1, 3, 9, 20]))]
        harness.add(prompt, max_tokens=draw.choice([1, 4, 12]), priority=draw.randrange(4))
        harness.step(ahead)
    assert harness.scheduler.num_waiting > 50, "the load must be more than can be served"
    never = harness.device.next_number
    starts = [(harness.arrivals[each], harness.starts.get(each, never)) for each in harness.requests]
    for number, (arrival, start) in enumerate(starts):
        assert all(start <= other for later, other in starts[number:] if later > arrival + 60)
    harness.drain(ahead)


def test_urgent_requests_start_sooner_under_load():
    draw = random.Random(3)
    harness = Harness(SchedulerLimits(3, 12, ageing_steps=200), pages=40)
    urgency = {}
    for step in range(600):
        if step % 3 == 0:
            priority = 0 if draw.random() < 0.2 else 1
            prompt = [draw.randrange(1, VOCABULARY) for _ in range(6)]
            urgency[harness.add(prompt, max_tokens=10, priority=priority)] = priority
        harness.step(1)
    waits: dict[int, list[int]] = {0: [], 1: []}
    for each, start in harness.starts.items():
        waits[urgency[each]].append(start - harness.arrivals[each])
    assert sum(waits[0]) / len(waits[0]) < 0.2 * sum(waits[1]) / len(waits[1])


def test_a_large_prompt_is_not_overtaken_for_ever_by_small_ones():
    harness = Harness(SchedulerLimits(4, 40), pages=10)
    for _ in range(3):
        harness.add([5, 6, 7], max_tokens=12)
    harness.step(1)
    large = harness.add([8] * 36, max_tokens=2)
    for step in range(200):
        harness.add([step % VOCABULARY, 9], max_tokens=12)
        harness.step(1)
        if large in harness.ends:
            assert step < 40
            return
    raise AssertionError("the large prompt starves")
