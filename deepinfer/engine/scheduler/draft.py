"""A plan while it is being made."""

from collections.abc import Sequence
from dataclasses import replace

from deepinfer.core.plan import Encode, PageLoad, Plan, Span
from deepinfer.engine.scheduler.job import Job
from deepinfer.engine.scheduler.ports import NO_DRAFTS, Verification


class Draft:
    """Spans of one step within its budget of rows; each span moves its job on."""

    def __init__(self, budget: int, verification: Verification = NO_DRAFTS) -> None:
        self.budget = budget
        self.verification = verification
        self.jobs: list[Job] = []
        self.prefill_rows = 0
        self._spans: list[Span] = []
        self._pages: dict[int, tuple[int, ...]] = {}
        self._loads: list[PageLoad] = []
        self._dropped: tuple[str, ...] = ()
        self._encodes: tuple[Encode, ...] = ()

    def decode(self, job: Job, drafts: int) -> None:
        """Run the newest token and so many of the drafts behind it.

        If a step in flight is to sample it, and where there may be drafts, only the device will know the ids.
        """
        known = not job.pending and not self.verification.speculative
        ids = (job.sequence.generated[-1],) if known else None
        self._add(job, 1 + drafts, ids, True)
        job.next -= drafts
        job.slack += drafts

    def limit_drafts(self, rows: int) -> int:
        """Let drafts take no more than `rows` rows; returns how many one request's may take."""
        total = self.verification.total
        if total is not None:
            self.verification = replace(self.verification, total=min(total, rows))
            return self.verification.depth
        return rows

    def decoded(self) -> None:
        """All newest tokens are in: rows that drafts together will not use are free for prompts."""
        total = self.verification.total
        if total is not None:
            self.budget += max(0, sum(span.drafts for span in self._spans) - total)

    def next_chunk(self, job: Job, chunk: int) -> int:
        """Where the job's next rows can end, if at most `chunk` known tokens are run."""
        return min(job.next + min(chunk, self.budget), job.sequence.length)

    def prefill(self, job: Job, end: int) -> bool:
        """Run the known tokens up to `end`; returns whether those were the last of them."""
        known, count = job.sequence.length, end - job.next
        self.prefill_rows += count
        self._add(job, count, job.token_ids(job.next, end), end == known)
        return end == known

    def hold(self, job: Job, loads: Sequence[PageLoad] = ()) -> None:
        """Tell the device about the job's pages and what is to be loaded into them."""
        self._pages[_slot(job)] = tuple(job.pages)
        self._loads.extend(loads)

    def encode(self, dropped: tuple[str, ...], encodes: tuple[Encode, ...]) -> None:
        """Let go of some images, and encode others."""
        self._dropped, self._encodes = dropped, encodes

    def plan(self, number: int) -> Plan:
        """Return what was drafted."""
        return Plan(
            number, tuple(self._spans), self._pages, tuple(self._loads), dropped=self._dropped, encodes=self._encodes,
            verified=self.verification.total, drafting=self.verification.drafting,
        )  # fmt: skip

    def _add(self, job: Job, count: int, ids: tuple[int, ...] | None, sample: bool) -> None:
        sequence = job.sequence
        span = Span(
            job.request_id,
            _slot(job),
            job.next,
            count,
            ids,
            job.write_from,
            job.floor,
            sequence.replay_start,
            job.decoder_from,
            sample,
            min(job.end, job.room),
        )
        self._spans.append(span)
        self.jobs.append(job)
        self.budget -= count
        job.next += count
        job.in_flight += 1
        job.pending += sample


def _slot(job: Job) -> int:
    if job.slot is None:
        raise ValueError(f"request {job.request_id} holds no slot")
    return job.slot
