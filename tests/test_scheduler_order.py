"""The order of service."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduler_fakes import FakePages, make_scheduler, request, run, shape

from deepinfer.engine.scheduler.job import Job
from deepinfer.engine.scheduler.order import Ranked, rank
from deepinfer.engine.sequence import Sequence


def job(request_id: int, place: int) -> Job:
    return Job(request_id, Sequence(request([1]), 0, (), 1), (1,), (place, request_id), 1, 0)


@given(st.lists(st.tuples(st.integers(-5, 5), st.booleans()), max_size=40))
def test_ranked_jobs_stay_sorted(changes: list[tuple[int, bool]]):
    ranked, model = Ranked(), []
    for number, (place, remove) in enumerate(changes):
        if remove and model:
            gone = model.pop(place % len(model))
            assert gone in ranked
            ranked.remove(gone)
            assert gone not in ranked
        else:
            model.append(job(number, place))
            ranked.insert(model[-1])
        model.sort(key=lambda each: each.rank)
        assert list(ranked) == model
        assert len(ranked) == len(model)
        assert ranked.first() is (model[0] if model else None)
        assert ranked.last() is (model[-1] if model else None)


def test_a_job_that_is_not_there_cannot_be_removed():
    ranked = Ranked()
    ranked.insert(job(1, 5))
    for other in (job(2, 5), job(3, 9), job(1, 5)):
        with pytest.raises(ValueError, match=f"request {other.request_id} is not in this list"):
            ranked.remove(other)


def test_going_through_ranked_jobs_sees_those_of_the_start():
    ranked = Ranked()
    jobs = [job(number, number) for number in range(3)]
    for each in jobs:
        ranked.insert(each)
    seen = []
    for each in ranked:
        ranked.remove(each)
        seen.append(each)
    assert seen == jobs


@given(st.integers(-3, 3), st.integers(0, 3), st.integers(0, 1000), st.integers(1, 50))
def test_waiting_makes_up_for_priority_at_a_fixed_rate(priority: int, worse: int, step: int, ageing: int):
    early = rank(priority + worse, step, 1, ageing)
    assert early < rank(priority, step + worse * ageing, 2, ageing)
    if worse:
        assert rank(priority, step + worse * ageing - 1, 2, ageing) < early


def start_order(priorities: list[int], **settings: int) -> list[int]:
    """The order in which requests of these priorities start when only one runs at a time."""
    scheduler = make_scheduler(FakePages(), slots=1, **settings)
    for priority in priorities:
        scheduler.add(request([1, 2], max_tokens=1, priority=priority))
    order = []
    while scheduler.has_work():
        order.append(shape(run(scheduler)[0])[0][0])
    return order


def test_lower_priorities_first_then_in_order_of_arrival():
    assert start_order([0, 5, -1, 0, 5, -1], ageing_steps=100) == [2, 5, 0, 3, 1, 4]


@pytest.mark.parametrize(("ageing_steps", "place"), [(3, 6), (5, 10)])
def test_a_request_of_low_priority_waits_no_longer_than_its_handicap(ageing_steps: int, place: int):
    """A request of better priority comes in every step, and there is one slot."""
    scheduler = make_scheduler(FakePages(), slots=1, ageing_steps=ageing_steps)
    low = scheduler.add(request([1], max_tokens=1, priority=2))
    for step in range(100):
        scheduler.add(request([1], max_tokens=1, priority=0))
        if shape(run(scheduler)[0])[0][0] == low:
            assert step == place
            return
    raise AssertionError("starved")
