"""The engine's statistics: what counts as a prompt row, speeds, and the report."""

import time
from collections import Counter

import pytest

from deepinfer.cache.statistics import CacheStatistics
from deepinfer.core.plan import Plan, Span
from deepinfer.core.request import TEXT, Request
from deepinfer.core.sampling_params import SamplingParams
from deepinfer.engine.scheduler import Job, Statistics
from deepinfer.engine.sequence import Sequence
from deepinfer.engine.statistics import EngineStatistics, Pace

PROMPT = 5


def job(number: int) -> Job:
    request = Request(0, None, (1,) * PROMPT, (TEXT,) * PROMPT, (), SamplingParams(), 0)
    return Job(number, Sequence(request, 0, (), 4), request.token_ids, (0, number), 9, 0)


JOBS = {number: job(number) for number in range(3)}


def span(number: int, first: int, count: int, known: bool = True, sample: bool = True) -> Span:
    return Span(number, number, first, count, (1,) * count if known else None, 0, 0, 0, 0, sample)


@pytest.fixture
def statistics(monkeypatch: pytest.MonkeyPatch) -> EngineStatistics:
    """Each look at the clock is two seconds after the last."""
    clock = iter(range(100, 10_000, 2))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))
    made = EngineStatistics(Statistics(), CacheStatistics())
    made.begin()
    return made


def step(statistics: EngineStatistics, plan: Plan, tokens: int = 1) -> None:
    """A step by which requests took so many tokens."""
    statistics.scheduler.generated_tokens += tokens
    statistics.step(plan, JOBS)


@pytest.mark.parametrize("known", [True, False], ids=["plain", "asynchronous"])
def test_generated_tokens_are_decode_rows(statistics: EngineStatistics, known: bool) -> None:
    step(statistics, Plan(0, (span(0, PROMPT, 1, known), span(1, PROMPT + 3, 1, known))), tokens=2)
    assert (statistics.prefill, statistics.decode) == (Pace(), Pace(2, 2.0))
    assert statistics.decode.per_second == 1.0


@pytest.mark.parametrize("known", [True, False], ids=["plain", "asynchronous"])
def test_a_step_with_prompt_rows_is_prefill(statistics: EngineStatistics, known: bool) -> None:
    """Chunks of one row, that of the last prompt token among them, are no decode rows; nor is what is run again."""
    step(statistics, Plan(0, (span(0, PROMPT, 1, known), span(1, 0, 3, sample=False))))
    step(statistics, Plan(1, (span(0, PROMPT + 1, 1, known), span(1, 3, 1, sample=False))))
    step(statistics, Plan(2, (span(1, PROMPT - 1, 1),)))
    assert (statistics.prefill, statistics.decode) == (Pace(5, 6.0), Pace())
    step(statistics, Plan(3, (span(2, PROMPT, 2),)))
    assert statistics.prefill == Pace(7, 8.0)


def test_time_between_two_runs_counts_for_neither(statistics: EngineStatistics) -> None:
    step(statistics, Plan(0, (span(0, PROMPT, 1),)))
    for _ in range(5):
        time.perf_counter()
    statistics.begin()
    step(statistics, Plan(1, (span(0, PROMPT + 1, 1),)))
    assert statistics.decode == Pace(2, 4.0)


def test_the_report_of_an_engine_that_did_nothing() -> None:
    lines = EngineStatistics(Statistics(), CacheStatistics()).lines()
    assert [line.split()[0] for line in lines] == ["requests", "tokens", "speed", "steps", "cache"]
    assert "prefill 0 tokens/s, decode 0.0 tokens/s" in lines[2]
    assert lines[4].endswith("0 of 0 prompt tokens hit (0%)")


def test_the_report_tells_every_counter() -> None:
    scheduler = Statistics(
        finished=11, failed=2, cancelled=3, preemptions=4, steps=10, prefill_rows=80, decode_rows=20, largest_step=31,
        spans=25, generated_tokens=22,
    )  # fmt: skip
    cache = CacheStatistics(
        prompt_tokens=200, hit_tokens=50, misses=Counter({"too short": 1, "differs": 5}), loaded_pages=Counter(disk=6)
    )
    made = EngineStatistics(scheduler, cache)
    made.prefill, made.decode = Pace(80, 0.5), Pace(20, 4.0)
    assert made.lines() == [
        "requests   11 finished, 2 failed, 3 cancelled, 4 preemptions",
        "tokens     80 prompt rows, 22 generated",
        "speed      prefill 160 tokens/s, decode 5.0 tokens/s",
        "steps      10, mean 10.0 rows of 2.5 requests, largest 31 rows",
        "cache      50 of 200 prompt tokens hit (25%); misses: differs 5, too short 1; pages 6 from disk",
    ]
