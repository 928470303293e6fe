"""Which waiting request starts next."""

from deepinfer.engine.scheduler.draft import Draft
from deepinfer.engine.scheduler.job import Job
from deepinfer.engine.scheduler.order import Ranked
from deepinfer.engine.scheduler.ports import PageOwner
from deepinfer.engine.scheduler.running import Running


class Admission:
    """Starts waiting jobs strictly in the order of service: one that does not fit yet is not overtaken.

    A job gets pages for all its known tokens at once, so that a prompt once begun is never short of them, and one page
    stays free for each running job that may still grow: else the newcomer would soon be preempted again.
    """

    def __init__(self, kv: PageOwner, running: Running, waiting: Ranked, window: int, prefix_hits: bool) -> None:
        self._kv = kv
        self._running = running
        self._waiting = waiting
        self._window = window
        self._prefix_hits = prefix_hits
        self._refused: tuple[int, int, int] | None = None

    def admit_next(self, draft: Draft) -> Job | None:
        """Start the first waiting job, if a slot and pages are free, and tell the draft of its pages."""
        job = self._waiting.first()
        if job is None or not self._running.has_slot:
            return None
        spare = self._running.growing()
        attempt = (job.request_id, self._kv.available_pages, spare)
        if attempt == self._refused:  # nothing has changed: do not search the prefix cache in every step
            return None
        scored = job.sequence.request.params.prompt_logprobs is not None  # then every row of the prompt has to run
        may_hit = self._prefix_hits and not job.preemptions and not scored
        admitted = self._kv.admit(job.request_id, job.keys, job.sequence.length, spare=spare, may_hit=may_hit)
        if admitted is None:
            self._refused = attempt
            return None
        self._waiting.remove(job)
        job.start(self._running.take_slot(), admitted, self._kv.page_size, self._window)
        self._running.prefilling.insert(job)
        draft.hold(job, admitted.loads)
        return job
