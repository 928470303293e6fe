"""Requests that share another one's prompt: they wait for it, for nothing else, and never for ever."""

from dataclasses import replace

import pytest
from scheduler_fakes import FakePages, commit, make_scheduler, request, run, shape

from deepinfer.core.sampling_params import SamplingParams
from deepinfer.engine.scheduler import Phase, Scheduler

PROMPT = range(20, 29)  # two whole pages and a token


def three(**settings: bool) -> Scheduler:
    """A leader and two followers."""
    scheduler = make_scheduler(FakePages(), **settings)
    leader = scheduler.add(request(PROMPT))
    for _ in range(2):
        scheduler.add(request(PROMPT), after=leader)
    return scheduler


def test_they_start_when_the_prompt_has_run_and_its_pages_are_shared() -> None:
    scheduler = three()
    plan, _ = run(scheduler)
    assert shape(plan) == [(0, 0, 9)]
    assert scheduler.num_waiting == 2
    plan, _ = run(scheduler)
    assert [span.request_id for span in plan.spans] == [0, 1, 2]


def test_one_step_ahead_they_miss_one_plan() -> None:
    scheduler = three()
    first, second = scheduler.plan(), scheduler.plan()
    assert first is not None
    assert second is not None
    assert [span.request_id for span in second.spans] == [0]
    commit(scheduler, first)
    third = scheduler.plan()
    assert third is not None
    assert [span.request_id for span in third.spans] == [0, 1, 2]


def test_a_chunk_of_the_prompt_is_not_enough() -> None:
    scheduler = three(chunk=4)
    for _ in range(3):
        plan, _ = run(scheduler)
        assert [span.request_id for span in plan.spans] == [0]
    assert len(run(scheduler)[0].spans) == 3


def test_others_go_past_them() -> None:
    scheduler = three()
    other = scheduler.add(request(range(40, 44)))
    assert [span.request_id for span in run(scheduler)[0].spans] == [0, other]


@pytest.mark.parametrize("ended", ["cancelled", "failed"])
def test_they_start_by_themselves_when_the_leader_ends_before(ended: str) -> None:
    scheduler = three()
    if ended == "cancelled":
        scheduler.cancel(0)
    else:
        plan = scheduler.plan()
        assert plan is not None
        assert [job.request_id for job in scheduler.fail(plan.number, RuntimeError())] == [0]
    assert [span.request_id for span in run(scheduler)[0].spans] == [1, 2]


def test_one_that_is_cancelled_meanwhile_is_gone() -> None:
    scheduler = three()
    job = scheduler.cancel(1)
    assert job is not None
    assert job.phase is Phase.ENDED
    run(scheduler)
    assert [span.request_id for span in run(scheduler)[0].spans] == [0, 2]
    for request_id in (0, 2):
        scheduler.cancel(request_id)
    assert not scheduler.has_work()


@pytest.mark.parametrize("case", ["no prefix cache", "less than a page", "prompt log-probabilities", "leader is gone"])
def test_where_nothing_can_be_shared_nobody_waits(case: str) -> None:
    scheduler = make_scheduler(FakePages(), prefix_hits=case != "no prefix cache", budget=32)
    one = request(PROMPT[:4] if case == "less than a page" else PROMPT)
    if case == "prompt log-probabilities":
        one = replace(one, params=SamplingParams(prompt_logprobs=1))
    leader = scheduler.add(one)
    if case == "leader is gone":
        scheduler.cancel(leader)
    scheduler.add(one, after=leader)
    assert [span.request_id for span in run(scheduler)[0].spans] == [1] if case == "leader is gone" else [0, 1]


def test_a_request_for_prompt_log_probabilities_runs_everything() -> None:
    scheduler = make_scheduler(FakePages(hits={0: 8}))
    scheduler.add(replace(request(PROMPT), params=SamplingParams(prompt_logprobs=0)))
    (span,) = run(scheduler)[0].spans
    assert (span.first, span.count, span.decoder_from, span.cut, span.write_from) == (0, 9, 0, 0, 0)


def test_a_token_that_could_not_be_drawn_fails_its_request_alone() -> None:
    scheduler = make_scheduler(FakePages())
    for _ in range(2):
        scheduler.add(request(PROMPT[:4]))
    plan = scheduler.plan()
    assert plan is not None
    bad, good = scheduler.commit(plan.number, {0: [-1], 1: [5]})
    assert (bad.sequence.finish_reason, bad.sequence.generated) == ("error", [])
    assert "no token could be drawn" in str(bad.error)
    assert good.sequence.generated == [5]
