"""The two loops over a real scheduler and a stand-in for the model, whose next token is the span's end."""

import threading
from collections.abc import Callable, Sequence

import pytest
import torch
from scheduler_fakes import FakePages, make_scheduler, request

from deepinfer.core.plan import Plan
from deepinfer.core.sampled import Sampled
from deepinfer.engine.loop import Runner, run_ahead, run_plain
from deepinfer.engine.scheduler import Job, Scheduler

Loop = Callable[[Scheduler, Runner, Callable[[Plan, Sequence[Job]], None]], None]
LOOPS = [run_plain, run_ahead]


class Counter:
    """Answers each sampling span with its end, and may raise in chosen steps."""

    def __init__(self, raises: dict[int, BaseException] | None = None) -> None:
        self.raises = raises or {}
        self.plans: list[Plan] = []
        self.threads: set[int] = set()

    def run(self, plan: Plan) -> Sampled:
        self.threads.add(threading.get_ident())
        self.plans.append(plan)
        if plan.number in self.raises:
            raise self.raises[plan.number]
        return Sampled(torch.tensor([span.end for span in plan.spans if span.sample], dtype=torch.int64))


class Record:
    """A scheduler with requests (prompt length, most tokens), and what the loop tells of them."""

    def __init__(self, *requests: tuple[int, int], **settings: int) -> None:
        self.kv = FakePages()
        self.scheduler = make_scheduler(self.kv, **settings)
        self.jobs = [self.scheduler.job(self.add(length, most)) for length, most in requests]
        self.steps: list[tuple[int, list[int]]] = []

    def add(self, length: int, most: int) -> int:
        return self.scheduler.add(request(range(20, 20 + length), most))

    def landed(self, plan: Plan, extended: Sequence[Job]) -> None:
        self.steps.append((plan.number, [job.request_id for job in extended]))

    def check_empty(self) -> None:
        assert not self.scheduler.has_work()
        assert (self.scheduler.num_waiting, self.scheduler.num_running) == (0, 0)
        assert sorted(self.kv.free) == list(range(self.kv.total_pages))

    @property
    def generated(self) -> list[list[int]]:
        return [job.sequence.generated for job in self.jobs]


@pytest.mark.parametrize("loop", LOOPS)
def test_every_request_gets_its_tokens_and_every_step_is_told_of(loop: Loop) -> None:
    record, runner = Record((3, 1), (5, 3), (7, 2), slots=2), Counter()
    loop(record.scheduler, runner, record.landed)
    assert record.generated == [[3], [5, 6, 7], [7, 8]]
    assert [number for number, _ in record.steps] == [plan.number for plan in runner.plans]
    told = [request_id for _, extended in record.steps for request_id in extended]
    assert sorted(told) == [0, 1, 1, 1, 2, 2]
    record.check_empty()


def test_without_work_neither_loop_does_anything() -> None:
    for loop in LOOPS:
        record, runner = Record(), Counter()
        loop(record.scheduler, runner, record.landed)
        assert (record.steps, runner.plans) == ([], [])


def test_the_plain_loop_knows_every_token_and_the_other_leaves_them_on_the_device() -> None:
    seen = []
    for loop in LOOPS:
        record, runner = Record((3, 4)), Counter()
        loop(record.scheduler, runner, record.landed)
        seen.append([plan.spans[0].token_ids for plan in runner.plans])
    assert seen == [[(20, 21, 22), (3,), (4,), (5,)], [(20, 21, 22), None, None, None]]


def test_one_step_is_planned_while_another_runs() -> None:
    """The first step does not end before the second one is planned."""
    record = Record((3, 4))
    planned = threading.Event()
    plan = record.scheduler.plan

    def announcing() -> Plan | None:
        made = plan()
        if made is not None and made.number == 1:
            planned.set()
        return made

    class Waiting(Counter):
        def run(self, plan: Plan) -> Sampled:
            assert planned.wait(20), "nothing was planned meanwhile"
            return super().run(plan)

    record.scheduler.plan = announcing  # type: ignore[method-assign]
    runner = Waiting()
    run_ahead(record.scheduler, runner, record.landed)
    assert record.generated == [[3, 4, 5, 6]]
    assert threading.get_ident() not in runner.threads


def test_what_overshoots_the_end_is_dropped() -> None:
    """The fourth token is a stop token: the step behind it has run already."""
    record, runner = Record(), Counter()
    job = record.scheduler.job(record.scheduler.add(request([20, 21], 9)))
    job.sequence.stop_tokens = {5}
    run_ahead(record.scheduler, runner, record.landed)
    assert job.sequence.generated == [2, 3, 4, 5]
    assert len(runner.plans) == 5
    assert record.scheduler.statistics.dropped_rows == 1
    record.check_empty()


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("broken", [0, 1, 2])
def test_a_step_that_raises_loses_its_own_requests_only(loop: Loop, broken: int) -> None:
    """Two run at once, two come later."""
    error = ValueError("the model fell over")
    record, runner = Record((3, 4), (5, 4), (7, 4), (8, 4), slots=2), Counter({broken: error})
    loop(record.scheduler, runner, record.landed)
    lost = [job for job in record.jobs if job.error is not None]
    assert [job.request_id for job in lost] == [span.request_id for span in runner.plans[broken].spans] == [0, 1]
    assert all(job.error is error and job.sequence.finish_reason == "error" for job in lost)
    assert record.generated[2:] == [[7, 8, 9, 10], [8, 9, 10, 11]]
    assert (broken, [0, 1]) in record.steps
    record.check_empty()


@pytest.mark.parametrize("loop", LOOPS)
def test_a_runner_that_returns_too_few_tokens_fails_the_step(loop: Loop) -> None:
    class Short(Counter):
        def run(self, plan: Plan) -> Sampled:
            return Sampled(super().run(plan).tokens[1:])

    record = Record((3, 4), (5, 4))
    loop(record.scheduler, Short(), record.landed)
    assert all(isinstance(job.error, ValueError) for job in record.jobs)
    record.check_empty()


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("step", [0, 1, 3])
def test_an_interrupt_leaves_no_step_in_flight(loop: Loop, kind: type[BaseException], step: int) -> None:
    record, runner = Record((3, 9), (5, 9), slots=1), Counter({step: kind()})
    with pytest.raises(kind):
        loop(record.scheduler, runner, record.landed)
    assert "interrupted by" in str(record.jobs[0].error)
    runner.raises = {}
    loop(record.scheduler, runner, record.landed)
    assert record.generated[1] == list(range(5, 14))
    record.check_empty()


@pytest.mark.parametrize("loop", LOOPS)
def test_an_error_of_the_listener_leaves_no_step_in_flight(loop: Loop) -> None:
    record = Record((3, 9))

    def broken(plan: Plan, extended: Sequence[Job]) -> None:
        record.landed(plan, extended)
        if len(record.steps) == 3:
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        loop(record.scheduler, Counter(), broken)
    record.scheduler.cancel(0)
    later = record.scheduler.job(record.add(4, 2))
    loop(record.scheduler, Counter(), record.landed)
    assert later.sequence.generated == [4, 5]
    record.check_empty()
