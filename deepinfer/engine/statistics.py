"""What an engine has done: requests, tokens, speed, batches, cache."""

import time
from collections.abc import Mapping
from dataclasses import dataclass

from deepinfer.cache.statistics import CacheStatistics
from deepinfer.core.plan import Plan, Span
from deepinfer.engine.scheduler import Job, Statistics


@dataclass
class Pace:
    """Rows and the seconds they took."""

    rows: int = 0
    seconds: float = 0.0

    @property
    def per_second(self) -> float:
        """Rows a second; 0 before the first."""
        return self.rows / self.seconds if self.seconds else 0.0


class EngineStatistics:
    """Counters since the engine was made; the engine changes them.

    A step that holds prompt rows counts for `prefill` (its prompt rows in its whole time), any other for `decode`.
    """

    def __init__(self, scheduler: Statistics, cache: CacheStatistics) -> None:
        self.scheduler, self.cache = scheduler, cache
        self.prefill, self.decode = Pace(), Pace()
        self._landed = 0.0

    def begin(self) -> None:
        """Steps follow, the first of them from now on."""
        self._landed = time.perf_counter()

    def step(self, plan: Plan, jobs: Mapping[int, Job]) -> None:
        """Count a step that just came back; `jobs` holds those of its spans."""
        now = time.perf_counter()
        prompt = sum(span.count for span in plan.spans if not _decodes(span, jobs[span.request_id]))
        pace, rows = (self.prefill, prompt) if prompt else (self.decode, plan.rows)
        pace.rows += rows
        pace.seconds += now - self._landed
        self._landed = now

    def lines(self) -> list[str]:
        """A report for people."""
        jobs, cache = self.scheduler, self.cache
        share = cache.hit_tokens / cache.prompt_tokens if cache.prompt_tokens else 0.0
        misses = ", ".join(f"{reason} {count}" for reason, count in cache.misses.most_common())
        tiers = ", ".join(f"{count} from {tier}" for tier, count in cache.loaded_pages.items())
        return [
            f"requests   {jobs.finished} finished, {jobs.failed} failed, {jobs.cancelled} cancelled, "
            f"{jobs.preemptions} preemptions",
            f"tokens     {jobs.prefill_rows} prompt rows, {jobs.generated_tokens} generated",
            f"speed      prefill {self.prefill.per_second:.0f} tokens/s, decode {self.decode.per_second:.1f} tokens/s",
            f"steps      {jobs.steps}, mean {jobs.mean_step:.1f} rows of {jobs.mean_requests:.1f} requests, "
            f"largest {jobs.largest_step} rows",
            f"cache      {cache.hit_tokens} of {cache.prompt_tokens} prompt tokens hit ({share:.0%})"
            + (f"; misses: {misses}" if misses else "")
            + (f"; pages {tiers}" if tiers else ""),
        ]


def _decodes(span: Span, job: Job) -> bool:
    """Whether the span is one generated token; several are run again, like a prompt, after a preemption."""
    return span.count == 1 and span.first >= len(job.sequence.request.token_ids)
