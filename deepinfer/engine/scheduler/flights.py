"""The steps that were planned and have not come back."""

from collections import deque
from dataclasses import dataclass

from deepinfer.core.plan import Plan
from deepinfer.engine.scheduler.draft import Draft
from deepinfer.engine.scheduler.job import Job

MOST_IN_FLIGHT = 2
"""The step that runs and the one planned behind it."""


@dataclass(frozen=True, slots=True)
class Flight:
    """A plan with the job of each of its spans."""

    plan: Plan
    jobs: tuple[Job, ...]


class Flights:
    """Numbers the plans and sees that they come back in their order."""

    def __init__(self) -> None:
        self.next_number = 0
        self._flights: deque[Flight] = deque()

    def __len__(self) -> int:
        return len(self._flights)

    def open(self, draft: Draft) -> Plan:
        """Send a step off."""
        plan = draft.plan(self.next_number)
        self._flights.append(Flight(plan, tuple(draft.jobs)))
        self.next_number += 1
        return plan

    def check_room(self) -> None:
        """ValueError unless one more step may be planned."""
        if len(self._flights) == MOST_IN_FLIGHT:
            first = self._flights[0].plan.number
            raise ValueError(
                f"{MOST_IN_FLIGHT} steps are in flight; commit (or fail) step {first} before the next plan"
            )

    def oldest(self, number: int) -> Flight:
        """Return the step that must come back next; ValueError if that is not `number`."""
        if not self._flights:
            raise ValueError(f"step {number} came back, but no step is in flight")
        if self._flights[0].plan.number != number:
            raise ValueError(f"step {number} came back, but step {self._flights[0].plan.number} is the next to do so")
        return self._flights[0]

    def close(self, number: int) -> Flight:
        """Take back the oldest step, which `number` must be."""
        flight = self.oldest(number)
        self._flights.popleft()
        return flight
