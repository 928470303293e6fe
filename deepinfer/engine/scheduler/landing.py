"""What a step's return means for its requests."""

from collections.abc import Collection, Mapping, Sequence

from deepinfer.core.errors import RequestError
from deepinfer.core.plan import Span
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
        self,
        flight: Flight,
        tokens: Mapping[int, Sequence[int]],
        chances: Mapping[int, Sequence[float]],
        failures: Sequence[tuple[Job, Exception]] = (),
    ) -> list[Job]:
        """Take the results of a step that went well, but for some jobs; returns those that failed or got tokens."""
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
                written = span.end
                if span.sample:
                    written = self._append(job, span, tokens[job.request_id])
                    if job.request_id in chances:
                        job.chances = (*job.chances[-1:], chances[job.request_id])
                    extended.append(job)
                if job.loaded or written - job.published >= self._page_size:
                    self._publish(job, written)
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

    def _append(self, job: Job, span: Span, tokens: Sequence[int]) -> int:
        """Hand over tokens up to one that ends the request; returns how many tokens' KV is settled."""
        sequence, accepted = job.sequence, len(tokens) - 1
        job.pending -= 1
        job.next += accepted
        job.slack -= span.drafts
        # A row's token is in its sequence before the row runs, or was accepted: only the newest token has no row yet.
        settled = sequence.length + accepted
        for token in tokens:
            if token < 0:
                self._fail(job, RequestError(_NO_TOKEN))
                break
            sequence.append(token)
            self._statistics.generated_tokens += 1
            if sequence.finish_reason is not None:
                self._statistics.finished += 1
                self._departures.end(job)
                break
        return min(settled, sequence.length)

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


def _check_tokens(flight: Flight, tokens: Mapping[int, Sequence[int]]) -> None:
    """ValueError, before anything changes, unless each request that needs some has a possible number of tokens."""
    for span, job in zip(flight.plan.spans, flight.jobs, strict=True):
        if not span.sample or job.void or job.phase is Phase.ENDED:
            continue
        count = len(tokens.get(span.request_id, ()))
        if not count:
            raise ValueError(f"step {flight.plan.number} sampled no token for request {span.request_id}")
        if count > 1 + span.drafts:
            raise ValueError(
                f"step {flight.plan.number} gave request {span.request_id} {count} tokens for {span.drafts} drafts"
            )
