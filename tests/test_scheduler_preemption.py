"""What happens when pages run out."""

import pytest
from scheduler_fakes import FakePages, commit, make_scheduler, request, run, shape
from scheduler_harness import Harness

from deepinfer.engine.scheduler import SchedulerLimits


def crowd(pages: int, *, prompts: tuple[int, ...] = (3, 3, 3), priorities: tuple[int, ...] = (0, 0, 0)):
    """Requests with prompts of these lengths that decode, in a cache that has shrunk to `pages` pages of 4 tokens."""
    kv = FakePages(total_pages=pages + len(prompts))  # room enough for admission
    scheduler = make_scheduler(kv, ageing_steps=100)
    for length, priority in zip(prompts, priorities, strict=False):
        scheduler.add(request(range(1, length + 1), max_tokens=5, priority=priority))
    run(scheduler)
    kv.total_pages = pages
    del kv.free[-len(prompts) :]
    return kv, scheduler


def test_the_newest_is_preempted_and_begins_again_with_what_it_generated():
    _, scheduler = crowd(pages=4)
    run(scheduler, token=8)
    plan, _ = run(scheduler, token=9)  # each needs a second page: one is free
    assert shape(plan) == [(0, 4, 1), (1, 4, 1)]
    assert (scheduler.statistics.preemptions, scheduler.num_waiting) == (1, 1)
    while (plan := scheduler.plan()).spans[-1].request_id != 2:
        commit(scheduler, plan, token=9)
    span = plan.spans[-1]
    assert (span.first, span.token_ids, span.sample) == (0, (1, 2, 3, 7, 8), True)
    (job,) = commit(scheduler, plan, token=9)
    assert job.sequence.generated == [7, 8, 9]
    assert (job.preemptions, job.miss) == (1, "mode forbids")


def test_the_lowest_priority_goes_before_the_newest():
    _, scheduler = crowd(pages=4, priorities=(0, 3, 0))
    run(scheduler)
    assert shape(run(scheduler)[0]) == [(0, 4, 1), (2, 4, 1)]


def test_a_request_may_have_to_preempt_itself():
    _, scheduler = crowd(pages=3, prompts=(6, 3))  # the first has room left
    run(scheduler)
    assert shape(run(scheduler)[0]) == [(0, 7, 1)]
    assert scheduler.num_waiting == 1


def test_a_prompt_half_run_is_preempted_too():
    kv = FakePages(total_pages=5, page_size=4)
    scheduler = make_scheduler(kv, chunk=2)
    scheduler.add(request([1, 2, 3], max_tokens=9))
    run(scheduler)
    run(scheduler)
    scheduler.add(request(range(12), max_tokens=1))
    run(scheduler)
    kv.free.clear()
    plan, _ = run(scheduler)
    assert shape(plan) == [(0, 4, 1)]
    assert kv.held.keys() == {0}


def test_the_cut_stays_where_the_prompt_put_it():
    """Fourteen tokens, of which the last six are kept; when it begins again it has more tokens, but the same cut."""
    kv = FakePages(total_pages=8, page_size=4)
    scheduler = make_scheduler(kv)
    scheduler.add(request([1, 2, 3], max_tokens=20))
    scheduler.add(request(range(2, 16), max_tokens=12))
    cuts = set()
    while scheduler.has_work():
        for span in run(scheduler)[0].spans:
            if span.request_id == 1:
                cuts.add((span.cut, span.decoder_from))
    assert scheduler.statistics.preemptions > 0
    assert cuts == {(8, 8)}


def test_pages_in_flight_come_back_first():
    """The victims' rows are in flight: no page is free before they are back."""
    kv, scheduler = crowd(pages=3)
    in_flight = scheduler.plan()
    assert shape(scheduler.plan()) == []
    assert scheduler.statistics.preemptions == 2  # the first waits for the last one's page, the second lacks its own
    assert kv.held.keys() == {0, 1, 2}
    commit(scheduler, in_flight)
    assert kv.held.keys() == {0}
    assert shape(scheduler.plan())[0] == (0, 4, 1)


def test_the_last_token_of_a_victim_counts():
    _, scheduler = crowd(pages=2, prompts=(3, 3))
    in_flight = scheduler.plan()
    assert scheduler.plan() is None
    jobs = commit(scheduler, in_flight, token=8)
    assert [job.sequence.generated for job in jobs] == [[7, 8], [7, 8]]


def test_a_victim_may_end_before_it_leaves():
    kv, scheduler = crowd(pages=2, prompts=(3, 3))
    in_flight = scheduler.plan()
    scheduler.plan()
    scheduler.commit(in_flight.number, {0: [8], 1: [0]})
    assert kv.held.keys() == {0}
    assert (scheduler.num_waiting, scheduler.statistics.finished) == (0, 1)


def test_a_victim_may_be_cancelled_before_it_leaves():
    kv, scheduler = crowd(pages=2, prompts=(3, 3))
    in_flight = scheduler.plan()
    scheduler.plan()
    assert scheduler.cancel(1) is not None
    commit(scheduler, in_flight)
    assert kv.held.keys() == {0}
    assert (scheduler.num_waiting, scheduler.statistics.cancelled) == (0, 1)


def test_a_newcomer_leaves_a_page_for_each_who_may_grow():
    kv = FakePages(total_pages=9, page_size=4)
    scheduler = make_scheduler(kv)
    scheduler.add(request([1, 2, 3], max_tokens=9))  # has 1 page, may grow
    scheduler.add(request([1, 2, 3], max_tokens=2))  # its page will do
    scheduler.add(request([1, 2, 3], max_tokens=3))  # has 1 page, may grow
    run(scheduler)
    assert kv.spares == [0, 1, 1]
    scheduler.add(request([1, 2, 3]))
    run(scheduler)
    assert kv.spares[3:] == [2]


def test_pages_of_one_who_has_ended_are_waited_for_too():
    kv, scheduler = crowd(pages=4, prompts=(3, 3, 6))  # the last one has room left
    in_flight = scheduler.plan()
    scheduler.cancel(0)
    assert shape(scheduler.plan()) == [(2, 7, 1)]
    commit(scheduler, in_flight)
    assert scheduler.statistics.preemptions == 0
    assert kv.held.keys() == {1, 2}
    assert shape(scheduler.plan())[0] == (1, 4, 1)


def test_lost_pages_are_an_error_and_not_a_wait_for_ever():
    kv = FakePages(total_pages=4)
    scheduler = make_scheduler(kv)
    scheduler.add(request(range(8)))
    kv.free.clear()
    with pytest.raises(RuntimeError, match="1 requests cannot run though no step is in flight: 0 of 4 pages"):
        scheduler.plan()


@pytest.mark.parametrize("ahead", [0, 1], ids=["plain", "asynchronous"])
def test_the_first_of_all_is_never_preempted_and_all_end_in_order_of_service(ahead: int):
    harness = Harness(SchedulerLimits(max_num_seqs=6, max_num_batched_tokens=40), pages=8)
    for index in range(12):
        harness.add([index + 1] * 9, max_tokens=None)
    while harness.scheduler.has_work():
        alive = [index for index in range(12) if index not in harness.ends]
        before = {job.request_id: job.preemptions for job in harness.scheduler._jobs.values()}
        harness.step(ahead)
        if alive and alive[0] not in harness.ends:
            first = harness.scheduler._jobs[alive[0]]
            assert first.preemptions == before[alive[0]]
    harness.check_empty()
    assert harness.scheduler.statistics.preemptions > 5
