"""What a scheduler refuses: settings that would starve someone, requests that can never fit."""

import subprocess
import sys

import pytest
from scheduler_fakes import FakePages, make_scheduler, request, run, shape
from scheduler_harness import CONTEXT

from deepinfer.core.errors import ConfigError, RequestError
from deepinfer.core.request import Request
from deepinfer.core.sampling_params import SamplingParams
from deepinfer.engine.scheduler import EndRules, SchedulerLimits


@pytest.mark.parametrize("name", ["max_num_seqs", "max_num_batched_tokens", "max_chunk", "ageing_steps"])
def test_limits_are_positive(name: str):
    with pytest.raises(ConfigError, match=f"{name} is 0; it takes a whole number >= 1"):
        SchedulerLimits(**{name: 0})


def test_every_running_request_has_room_to_decode():
    with pytest.raises(ConfigError, match="max_num_batched_tokens is 7; it takes at least max_num_seqs, 8"):
        SchedulerLimits(max_num_seqs=8, max_num_batched_tokens=7)
    assert SchedulerLimits(max_num_seqs=8, max_num_batched_tokens=8).max_chunk is None


def test_a_prompt_that_needs_more_pages_than_exist_is_refused_and_nothing_changes():
    scheduler = make_scheduler(FakePages(total_pages=4, page_size=4))
    with pytest.raises(RequestError, match="17 tokens; the cache of 16 tokens takes a prompt of 1 to 16"):
        scheduler.add(request(range(17)))
    assert not scheduler.has_work()
    assert scheduler.statistics.added == 0


def test_a_prompt_that_fills_the_cache_gets_one_token():
    scheduler = make_scheduler(FakePages(total_pages=4, page_size=4))
    request_id = scheduler.add(request(range(16), max_tokens=None))
    plan, (job,) = run(scheduler)
    assert shape(plan) == [(request_id, 0, 16)]
    assert (job.sequence.generated, job.sequence.finish_reason) == ([7], "length")


def test_a_reply_ends_where_the_cache_does():
    """The last token's own KV is never written, so it needs no page."""
    scheduler = make_scheduler(FakePages(total_pages=4, page_size=4))
    scheduler.add(request(range(2, 12), max_tokens=100))
    while scheduler.has_work():
        _, (job,) = run(scheduler)
    assert len(job.sequence.generated) == 16 + 1 - 10


@pytest.mark.parametrize("length", [0, CONTEXT], ids=["empty", "whole context"])
def test_a_prompt_needs_a_token_and_leaves_room_for_one(length: int):
    scheduler = make_scheduler(FakePages(total_pages=1000))
    with pytest.raises(RequestError, match=f"{length} tokens; the context of {CONTEXT} tokens takes a prompt of 1 to"):
        scheduler.add(request(range(length)))


@pytest.mark.parametrize(
    ("params", "stops", "most"),
    [
        (SamplingParams(max_tokens=5, stop_token_ids=[4]), {3, 4}, 5),
        (SamplingParams(max_tokens=None, ignore_eos=True), set(), 7),
        (SamplingParams(max_tokens=100), {3}, 7),
    ],
    ids=["own stops", "no limit", "limit beyond the context"],
)
def test_end_rules(params: SamplingParams, stops: set[int], most: int):
    made = Request(0, None, (1, 2, 5), (-1,) * 3, (), params, 0)
    sequence = EndRules(eos_token_id=3, context=10).sequence(made, replay_start=2, capacity=50)
    assert (set(sequence.stop_tokens), sequence.max_new_tokens, sequence.replay_start) == (stops, most, 2)


def test_planning_needs_no_tensors():
    code = "import deepinfer.engine.scheduler, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
