"""The requests that hold slots, and the free slots."""

from heapq import heapify, heappop, heappush

from deepinfer.engine.scheduler.job import Job
from deepinfer.engine.scheduler.order import Ranked


class Running:
    """Requests that get rows: those with prompt left to run, and those that decode."""

    def __init__(self, slots: int) -> None:
        self.prefilling = Ranked()
        self.decoding = Ranked()
        self._free = list(range(slots))
        heapify(self._free)

    def __len__(self) -> int:
        return len(self.prefilling) + len(self.decoding)

    @property
    def has_slot(self) -> bool:
        """Whether one more request could run."""
        return bool(self._free)

    def take_slot(self) -> int:
        """Take the lowest free slot, so that the slots in use stay close together."""
        return heappop(self._free)

    def give_slot(self, slot: int) -> None:
        """Take a slot back."""
        heappush(self._free, slot)

    def remove(self, job: Job) -> None:
        """Give the job no more rows; its slot stays taken."""
        (self.decoding if job in self.decoding else self.prefilling).remove(job)

    def last(self) -> Job:
        """The job to serve last, which is the first to lose its pages; at least one must run."""
        candidates = [job for job in (self.prefilling.last(), self.decoding.last()) if job is not None]
        return max(candidates, key=lambda job: job.rank)

    def growing(self) -> int:
        """How many may still need more pages than they have."""
        return sum(job.room < job.end for ranked in (self.prefilling, self.decoding) for job in ranked)
