"""How a request leaves its slot and pages: for good, or to begin again later."""

from deepinfer.engine.scheduler.job import Job, Phase
from deepinfer.engine.scheduler.order import Ranked
from deepinfer.engine.scheduler.ports import PageOwner
from deepinfer.engine.scheduler.running import Running
from deepinfer.engine.scheduler.statistics import Statistics


class Departures:
    """Takes jobs out of service; slot and pages are free only when no step in flight uses them."""

    def __init__(
        self, kv: PageOwner, running: Running, waiting: Ranked, jobs: dict[int, Job], statistics: Statistics
    ) -> None:
        self._kv = kv
        self._running = running
        self._waiting = waiting
        self._jobs = jobs
        self._statistics = statistics
        self.pages_coming = 0

    def end(self, job: Job) -> None:
        """End a job that has not ended."""
        self._stop(job, Phase.ENDED)

    def withdraw(self, job: Job) -> None:
        """Let a running job begin again later, from its tokens."""
        job.preemptions += 1
        self._statistics.preemptions += 1
        self._stop(job, Phase.LEAVING)

    def void(self, job: Job) -> None:
        """Let a job that holds pages begin again, because what it computed last cannot be used."""
        job.void = True
        if job.phase is Phase.RUNNING:
            self.withdraw(job)

    def landed(self, job: Job) -> None:
        """Note that a step with rows of the job came back."""
        job.in_flight -= 1
        if not job.in_flight and job.phase in (Phase.LEAVING, Phase.ENDED):
            self.pages_coming -= len(job.pages)
            self._let_go(job)

    def _stop(self, job: Job, phase: Phase) -> None:
        before, job.phase = job.phase, phase
        if before is Phase.FOLLOWING:
            del self._jobs[job.request_id]
        elif before is Phase.WAITING:
            self._waiting.remove(job)
            del self._jobs[job.request_id]
        elif before is Phase.RUNNING:
            self._running.remove(job)
            if job.in_flight:
                self.pages_coming += len(job.pages)
            else:
                self._let_go(job)

    def _let_go(self, job: Job) -> None:
        if job.slot is not None:
            self._running.give_slot(job.slot)
        self._kv.release(job.request_id)
        job.clear()
        if job.phase is Phase.ENDED:
            del self._jobs[job.request_id]
        else:
            job.phase = Phase.WAITING
            self._waiting.insert(job)
