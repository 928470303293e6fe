"""What a step's return means for its requests."""

from collections.abc import Collection, Mapping, Sequence

from deepinfer.core.errors import RequestError
from deepinfer.engine.scheduler.departures import Departures
from deepinfer.engine.scheduler.flights import Flight
from deepinfer.engine.scheduler.job import Job, Phase
from deepinfer.engine.scheduler.ports import PageOwner
from deepinfer.engine.scheduler.statistics import Statistics

_NO_TOKEN = (
    "no token could be drawn: every one is forbidden (by logit_bias, or by a grammar that leads nowhere), "
    "or the model's logits are not numbers"
)


class Landing:
    """Hands tokens to requests, publishes the pages they filled, and ends those that have all their tokens."""

    def __init__(self, kv: PageOwner, departures: Departures, statistics: Statistics) -> None:
        self._kv = kv
        self._page_size = kv.page_size
        self._departures = departures
        self._statistics = statistics

    def take(
        self, flight: Flight, tokens: Mapping[int, int], failures: Sequence[tuple[Job, Exception]] = ()
    ) -> list[Job]:
        """Take the results of a step that went well, but for some jobs; returns those that failed or got a token."""
        _check_tokens(flight, tokens)
        extended = []
        for job, error in failures:
            if job.phase is Phase.RUNNING and not job.void:
                self._fail(job, error)
                extended.append(job)
        for span, job in zip(flight.plan.spans, flight.jobs, strict=True):
            if job.phase is Phase.ENDED or job.void:
                self._statistics.dropped_rows += span.count
            else:
                if job.loaded or span.end - job.published >= self._page_size:
                    self._publish(job, span.end)
                if span.sample:
                    self._append(job, tokens[job.request_id])
                    extended.append(job)
            self._departures.landed(job)
        return extended

    def lose(self, flight: Flight, error: Exception, guilty: Collection[int] | None) -> list[Job]:
        """Fail the guilty jobs of a step that went wrong (None: all) and return them; the others begin again."""
        lost = []
        for job in flight.jobs:
            if job.phase is Phase.ENDED:
                continue
            if guilty is None or job.request_id in guilty:
                self._fail(job, error)
                lost.append(job)
            else:
                self._departures.void(job)
        for job in flight.jobs:
            self._departures.landed(job)
        return lost

    def _append(self, job: Job, token: int) -> None:
        job.pending -= 1
        if token < 0:
            self._fail(job, RequestError(_NO_TOKEN))
            return
        job.sequence.append(token)
        self._statistics.generated_tokens += 1
        if job.sequence.finish_reason is not None:
            self._statistics.finished += 1
            self._departures.end(job)

    def _publish(self, job: Job, written: int) -> None:
        """Share whole pages; the first call may be about what was loaded alone, before any row behind it has run."""
        whole = max(job.published, written - written % self._page_size)
        self._kv.publish(job.request_id, job.page_keys(job.published, whole))
        job.published, job.loaded = whole, False

    def _fail(self, job: Job, error: Exception) -> None:
        job.error = error
        job.sequence.finish_reason = "error"
        self._statistics.failed += 1
        self._departures.end(job)


def _check_tokens(flight: Flight, tokens: Mapping[int, int]) -> None:
    """ValueError, before anything changes, unless each request that needs one has a token."""
    for span, job in zip(flight.plan.spans, flight.jobs, strict=True):
        if span.sample and span.request_id not in tokens and not (job.void or job.phase is Phase.ENDED):
            raise ValueError(f"step {flight.plan.number} sampled no token for request {span.request_id}")
