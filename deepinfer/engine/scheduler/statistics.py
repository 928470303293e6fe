"""What the scheduler has done so far."""

from dataclasses import dataclass

from deepinfer.core.plan import Plan


@dataclass
class Statistics:
    """Counts since the start; only the scheduler changes them.

    added, finished, cancelled, failed: requests. preemptions: times one lost its pages and began again.
    steps: plans. prefill_rows, decode_rows: their rows. largest_step: most rows of one.
    spans: requests summed over the steps. dropped_rows: rows whose results nobody needed any more.
    generated_tokens: tokens that requests took. (The owner of the pages counts hits and misses.)
    """

    added: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    preemptions: int = 0
    steps: int = 0
    prefill_rows: int = 0
    decode_rows: int = 0
    largest_step: int = 0
    spans: int = 0
    dropped_rows: int = 0
    generated_tokens: int = 0

    @property
    def ended(self) -> int:
        """Requests that ended, in whatever way."""
        return self.finished + self.cancelled + self.failed

    @property
    def mean_step(self) -> float:
        """Mean rows of a step."""
        return (self.prefill_rows + self.decode_rows) / max(1, self.steps)

    @property
    def mean_requests(self) -> float:
        """Mean requests of a step."""
        return self.spans / max(1, self.steps)

    def planned(self, plan: Plan, prefill_rows: int) -> None:
        """Count a step with so many rows of prompts."""
        self.steps += 1
        self.prefill_rows += prefill_rows
        self.decode_rows += plan.rows - prefill_rows
        self.largest_step = max(self.largest_step, plan.rows)
        self.spans += len(plan.spans)
