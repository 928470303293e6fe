"""Pages for requests that outgrow theirs, taken from the last in the order of service when there are no more."""

from deepinfer.engine.scheduler.departures import Departures
from deepinfer.engine.scheduler.job import Job
from deepinfer.engine.scheduler.ports import PageOwner
from deepinfer.engine.scheduler.running import Running


class Growth:
    """Extends jobs, preempting others where it must; asked in the order of service.

    The first of all requests is never preempted, so it ends, then the next one: nobody loses pages for ever.
    """

    def __init__(self, kv: PageOwner, running: Running, departures: Departures) -> None:
        self._kv = kv
        self._running = running
        self._departures = departures
        self._expected = 0

    def start_plan(self) -> None:
        """Begin with what the steps in flight will give back."""
        self._expected = self._departures.pages_coming

    def make_room(self, job: Job, least: int, wanted: int) -> bool:
        """Get pages for `least` tokens, or for `wanted` if nobody loses by it; False if the job cannot run now."""
        spare = self._kv.extend(job.request_id, wanted)
        if spare is not None:
            job.take_pages(spare, self._kv.page_size)
            return True
        while (pages := self._kv.extend(job.request_id, least)) is None:
            if self._expected > 0:  # pages come back with a step in flight: waiting for it beats preempting more
                self._expected -= 1
                return False
            victim = self._running.last()
            if victim.in_flight:
                self._expected += len(victim.pages)
            self._departures.withdraw(victim)
            if victim is job:
                return False
        job.take_pages(pages, self._kv.page_size)
        return True
