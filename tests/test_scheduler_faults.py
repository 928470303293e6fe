"""A step that fails: who is lost, who begins again, and what must never be read."""

from scheduler_fakes import FakePages, commit, make_scheduler, request, run, shape

from deepinfer.core.plan import PageLoad
from deepinfer.engine.scheduler import Phase

ERROR = RuntimeError("out of luck")


def test_all_requests_of_a_failed_step_are_lost_and_no_others():
    kv = FakePages()
    scheduler = make_scheduler(kv, slots=2)
    inside = [scheduler.add(request([5, 6])) for _ in range(2)]
    outside = scheduler.add(request([8], max_tokens=2))
    plan = scheduler.plan()
    lost = scheduler.fail(plan.number, ERROR)
    assert [job.request_id for job in lost] == inside
    for job in lost:
        assert (job.phase, job.error, job.sequence.finish_reason) == (Phase.ENDED, ERROR, "error")
    assert kv.held == {}
    while scheduler.has_work():
        _, (job,) = run(scheduler)
        assert job.request_id == outside
    assert (scheduler.statistics.failed, scheduler.statistics.finished) == (2, 1)


def test_only_the_guilty_are_lost_and_the_others_begin_again():
    kv = FakePages(hits={0: 4, 1: 4, 2: 4})
    scheduler = make_scheduler(kv, budget=30)
    ids = [scheduler.add(request(range(2, 12), max_tokens=3)) for _ in range(3)]
    run(scheduler, token=20)
    (lost,) = scheduler.fail(scheduler.plan().number, ERROR, guilty={ids[1]})
    assert lost.request_id == ids[1]
    plan = scheduler.plan()
    assert shape(plan) == [(ids[0], 0, 11), (ids[2], 0, 11)]
    assert plan.spans[0].token_ids == (*range(2, 12), 20)
    assert [span.write_from for span in plan.spans] == [0, 0]  # what it hit first may be what went wrong
    jobs = commit(scheduler, plan, token=21)
    assert [job.sequence.generated for job in jobs] == [[20, 21], [20, 21]]


def test_what_was_planned_on_top_of_a_failed_step_is_dropped():
    kv = FakePages()
    scheduler = make_scheduler(kv)
    guilty, caught = scheduler.add(request([5, 6])), scheduler.add(request([5, 6]))
    failing = scheduler.plan()
    late = scheduler.add(request([8]))
    behind = scheduler.plan()
    assert shape(behind) == [(guilty, 2, 1), (caught, 2, 1), (late, 0, 1)]
    assert len(scheduler.fail(failing.number, ERROR, guilty=[guilty])) == 1
    assert kv.held.keys() == {guilty, caught, late}  # the step behind still uses them
    (job,) = commit(scheduler, behind, token=9)
    assert (job.request_id, job.sequence.generated) == (late, [9])
    assert kv.held.keys() == {late}
    assert scheduler.statistics.dropped_rows == 2
    plan, _ = run(scheduler)
    assert shape(plan) == [(late, 1, 1), (caught, 0, 2)]
    assert [span.token_ids for span in run(scheduler)[0].spans] == [(7,), (7,)]  # nothing in flight that is pending


def test_a_failed_step_publishes_nothing():
    kv = FakePages(page_size=4)
    scheduler = make_scheduler(kv)
    scheduler.add(request(range(8)))
    scheduler.fail(scheduler.plan().number, ERROR, guilty=())
    assert kv.published == {}
    run(scheduler)
    assert kv.published == {0: list(range(8))}


def test_requests_that_had_ended_are_not_lost_again():
    scheduler = make_scheduler(FakePages())
    request_id = scheduler.add(request([5, 6]))
    plan = scheduler.plan()
    scheduler.cancel(request_id)
    assert scheduler.fail(plan.number, ERROR) == []
    assert (scheduler.statistics.cancelled, scheduler.statistics.failed) == (1, 0)
    assert not scheduler.has_work()


def test_one_preempted_while_its_step_was_in_flight_is_lost_with_it():
    kv = FakePages(total_pages=4)
    scheduler = make_scheduler(kv)
    ids = [scheduler.add(request([1, 2, 3], max_tokens=9)) for _ in range(2)]
    run(scheduler)
    in_flight = scheduler.plan()
    kv.free.clear()
    assert scheduler.plan() is None
    assert scheduler.statistics.preemptions == 1
    assert [job.request_id for job in scheduler.fail(in_flight.number, ERROR)] == ids
    assert kv.held == {}
    assert not scheduler.has_work()


def test_one_preempted_while_its_step_was_in_flight_begins_again_once():
    kv = FakePages(total_pages=4)
    scheduler = make_scheduler(kv)
    ids = [scheduler.add(request([1, 2, 3], max_tokens=9)) for _ in range(2)]
    run(scheduler)
    in_flight = scheduler.plan()
    kv.free.clear()
    assert scheduler.plan() is None
    scheduler.fail(in_flight.number, ERROR, guilty=[ids[0]])
    plan = scheduler.plan()
    assert [(span.request_id, span.token_ids) for span in plan.spans] == [(ids[1], (1, 2, 3, 7))]


def test_loads_go_with_the_step_that_first_needs_them():
    load = PageLoad(1000, "data")
    kv = FakePages(hits={0: 4}, loads={0: (load,)})
    scheduler = make_scheduler(kv, chunk=3)
    scheduler.add(request(range(2, 12)))
    assert run(scheduler)[0].loads == (load,)
    assert run(scheduler)[0].loads == ()


def test_pages_whose_load_failed_are_never_published():
    kv = FakePages(hits={0: 4}, loads={0: (PageLoad(1000, "data"),)})
    scheduler = make_scheduler(kv)
    scheduler.add(request(range(2, 12)))
    scheduler.fail(scheduler.plan().number, ERROR, guilty=())
    plan, _ = run(scheduler)
    assert (shape(plan), plan.loads) == ([(0, 0, 10)], ())
    assert kv.published == {0: list(range(2, 10))}  # all of it is its own now


def test_retrying_everything_ends_when_the_fault_does():
    scheduler = make_scheduler(FakePages())
    scheduler.add(request([5, 6], max_tokens=2))
    for _ in range(5):
        assert scheduler.fail(scheduler.plan().number, ERROR, guilty=()) == []
    run(scheduler)
    _, (job,) = run(scheduler)
    assert (job.sequence.generated, job.sequence.finish_reason, job.preemptions) == ([7, 7], "length", 5)
