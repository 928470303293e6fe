"""A step planned before the last one is committed: tokens on the device, overshoot, what may not be freed yet."""

import pytest
from scheduler_device import STOP
from scheduler_fakes import FakePages, commit, make_scheduler, request, run, shape


def test_the_newest_token_stays_on_the_device():
    scheduler = make_scheduler(FakePages())
    scheduler.add(request([5, 6], max_tokens=4))
    first, second = scheduler.plan(), scheduler.plan()
    assert [span.token_ids for span in (*first.spans, *second.spans)] == [(5, 6), None]
    commit(scheduler, first)
    third = scheduler.plan()
    assert [(span.first, span.token_ids) for span in third.spans] == [(3, None)]
    commit(scheduler, second)
    commit(scheduler, third)
    assert [span.token_ids for span in scheduler.plan().spans] == [(7,)]  # nothing in flight: the host knows it


def test_chunks_of_a_prompt_follow_each_other_without_waiting():
    scheduler = make_scheduler(FakePages(), budget=4)
    scheduler.add(request(range(2, 12)))
    assert shape(scheduler.plan()) == [(0, 0, 4)]
    assert shape(scheduler.plan()) == [(0, 4, 4)]


def test_at_most_two_steps_are_in_flight():
    scheduler = make_scheduler(FakePages())
    scheduler.add(request([5, 6]))
    scheduler.plan()
    scheduler.plan()
    with pytest.raises(ValueError, match=r"2 steps are in flight; commit \(or fail\) step 0 before the next plan"):
        scheduler.plan()


def test_steps_come_back_in_their_order():
    scheduler = make_scheduler(FakePages())
    with pytest.raises(ValueError, match="step 0 came back, but no step is in flight"):
        scheduler.commit(0, {})
    scheduler.add(request([5, 6]))
    scheduler.plan()
    scheduler.plan()
    for back in (scheduler.commit, lambda number, _: scheduler.fail(number, RuntimeError())):
        with pytest.raises(ValueError, match="step 1 came back, but step 0 is the next to do so"):
            back(1, {0: 7})


def test_a_missing_token_changes_nothing():
    scheduler = make_scheduler(FakePages())
    ids = [scheduler.add(request([5, 6])) for _ in range(2)]
    plan = scheduler.plan()
    with pytest.raises(ValueError, match=f"step 0 sampled no token for request {ids[1]}"):
        scheduler.commit(plan.number, {ids[0]: [7]})
    assert [job.sequence.generated for job in commit(scheduler, plan)] == [[7], [7]]


def test_a_request_known_to_end_gets_no_row_too_many():
    scheduler = make_scheduler(FakePages())
    scheduler.add(request([5, 6], max_tokens=2))
    plans = [scheduler.plan(), scheduler.plan()]
    commit(scheduler, plans[0])
    assert scheduler.plan() is None
    assert scheduler.has_work()
    (job,) = commit(scheduler, plans[1])
    assert job.sequence.finish_reason == "length"
    assert not scheduler.has_work()
    assert scheduler.statistics.dropped_rows == 0


def test_overshoot_is_dropped_and_slot_and_pages_stay_taken_until_it_is_back():
    kv = FakePages()
    scheduler = make_scheduler(kv, slots=1)
    stopping, late = scheduler.add(request([5, 6])), scheduler.add(request([8]))
    first, overshoot = scheduler.plan(), scheduler.plan()
    (job,) = commit(scheduler, first, token=STOP)
    assert job.sequence.finish_reason == "stop"
    assert kv.held.keys() == {stopping}
    assert scheduler.plan() is None  # the slot is not free yet
    assert commit(scheduler, overshoot) == []
    assert job.sequence.generated == [STOP]
    assert kv.held == {}
    assert scheduler.statistics.dropped_rows == 1
    assert shape(scheduler.plan()) == [(late, 0, 1)]


def test_tokens_of_ended_requests_may_be_left_out():
    scheduler = make_scheduler(FakePages())
    scheduler.add(request([5, 6]))
    first, overshoot = scheduler.plan(), scheduler.plan()
    commit(scheduler, first, token=STOP)
    assert scheduler.commit(overshoot.number, {}) == []
    assert not scheduler.has_work()


@pytest.mark.parametrize("flights", [0, 1, 2])
def test_cancelling_frees_at_once_or_when_the_steps_are_back(flights: int):
    kv = FakePages()
    scheduler = make_scheduler(kv)
    request_id = scheduler.add(request([5, 6]))
    run(scheduler)
    plans = [scheduler.plan() for _ in range(flights)]
    job = scheduler.cancel(request_id)
    assert job is not None
    assert scheduler.cancel(request_id) is None
    for plan in plans:
        assert kv.held
        assert commit(scheduler, plan) == []
    assert job.sequence.generated == [7]
    assert not kv.held
    assert not scheduler.has_work()
    assert scheduler.statistics.cancelled == 1


def test_a_waiting_request_is_cancelled():
    scheduler = make_scheduler(FakePages(), slots=1)
    running, waiting = scheduler.add(request([5, 6], max_tokens=1)), scheduler.add(request([8]))
    assert scheduler.cancel(waiting) is not None
    assert shape(run(scheduler)[0]) == [(running, 0, 2)]
    assert not scheduler.has_work()


@pytest.mark.parametrize("request_id", [0, 99], ids=["ended", "unknown"])
def test_there_is_nothing_to_cancel(request_id: int):
    scheduler = make_scheduler(FakePages())
    scheduler.add(request([5, 6], max_tokens=1))
    run(scheduler)
    assert scheduler.cancel(request_id) is None
    assert scheduler.statistics.cancelled == 0
