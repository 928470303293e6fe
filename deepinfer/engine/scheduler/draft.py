"""A plan while it is being made."""

from collections.abc import Sequence

from deepinfer.core.plan import Encode, PageLoad, Plan, Span
from deepinfer.engine.scheduler.job import Job


class Draft:
    """Spans of one step within its budget of rows; each span moves its job on."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.jobs: list[Job] = []
        self.decode_rows = 0
        self._spans: list[Span] = []
        self._pages: dict[int, tuple[int, ...]] = {}
        self._loads: list[PageLoad] = []
        self._dropped: tuple[str, ...] = ()
        self._encodes: tuple[Encode, ...] = ()

    def decode(self, job: Job) -> None:
        """Run the newest token; if a step in flight is to sample it, only the device will know its id."""
        ids = None if job.pending else (job.sequence.generated[-1],)
        self._add(job, 1, ids, True)
        self.decode_rows += 1

    def next_chunk(self, job: Job, chunk: int) -> int:
        """Where the job's next rows can end, if at most `chunk` known tokens are run."""
        return min(job.next + min(chunk, self.budget), job.sequence.length)

    def prefill(self, job: Job, end: int) -> bool:
        """Run the known tokens up to `end`; returns whether those were the last of them."""
        known, count = job.sequence.length, end - job.next
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
            number, tuple(self._spans), self._pages, tuple(self._loads), dropped=self._dropped, encodes=self._encodes
        )

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
