"""The order of service: priorities, ageing, and jobs kept in that order."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter

from deepinfer.engine.scheduler.job import Job, Rank

_rank = attrgetter("rank")


def rank(priority: int, step: int, request_id: int, ageing_steps: int) -> Rank:
    """Return the rank of a request that comes at `step`.

    All waiting requests age alike, so their order never changes and is settled on arrival: a priority that is higher by
    one is worth an arrival `ageing_steps` steps later. Hence only requests of a bounded time can go before another.
    """
    return priority * ageing_steps + step, request_id


class Ranked:
    """Jobs in the order of service."""

    def __init__(self) -> None:
        self._jobs: list[Job] = []

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        """Go through the jobs of this moment, whatever comes or goes meanwhile."""
        return iter(self._jobs.copy())

    def __contains__(self, job: Job) -> bool:
        place = bisect_left(self._jobs, job.rank, key=_rank)
        return place < len(self._jobs) and self._jobs[place] is job

    def insert(self, job: Job) -> None:
        """Put the job at its place."""
        insort(self._jobs, job, key=_rank)

    def remove(self, job: Job) -> None:
        """Take the job out; ValueError if it is not here."""
        place = bisect_left(self._jobs, job.rank, key=_rank)
        if place == len(self._jobs) or self._jobs[place] is not job:
            raise ValueError(f"request {job.request_id} is not in this list")
        del self._jobs[place]

    def first(self) -> Job | None:
        """The job to serve first."""
        return self._jobs[0] if self._jobs else None

    def last(self) -> Job | None:
        """The job to serve last."""
        return self._jobs[-1] if self._jobs else None
