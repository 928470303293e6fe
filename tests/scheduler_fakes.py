"""A page owner that does as it is told, for tests that need one particular situation."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from scheduler_device import STOP
from scheduler_harness import CONTEXT, request

from deepinfer.core.plan import Admitted, PageLoad, Plan
from deepinfer.engine.replay import ReplayPolicy
from deepinfer.engine.scheduler import EndRules, Job, Scheduler, SchedulerLimits

SHARED = 1000
"""Pages from this number on are shared; they come from nowhere and go nowhere."""


@dataclass
class FakePages:
    """Counts pages; `hits` and `loads` (by request id) are what the next admission of a request finds."""

    total_pages: int = 16
    page_size: int = 4
    hits: dict[int, int] = field(default_factory=dict)
    loads: dict[int, tuple[PageLoad, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.free = list(range(self.total_pages))
        self.held: dict[int, list[int]] = {}
        self.calls: list[str] = []
        self.published: dict[int, list[Hashable]] = {}
        self.spares: list[int] = []

    @property
    def available_pages(self) -> int:
        return len(self.free)

    def admit(
        self, request_id: int, keys: Sequence[Hashable], tokens: int, *, spare: int, may_hit: bool
    ) -> Admitted | None:
        self.calls.append("admit")
        self.spares.append(spare)
        hit = self.hits.get(request_id, 0) if may_hit else 0
        assert hit < tokens
        shared = hit // self.page_size
        fresh = -(-tokens // self.page_size) - shared
        if len(self.free) - fresh < spare:
            return None
        self.held[request_id] = [self.free.pop(0) for _ in range(fresh)]
        pages = (*range(SHARED, SHARED + shared), *self.held[request_id])
        miss = None if may_hit else "mode forbids"
        return Admitted(pages, hit, miss, self.loads.get(request_id, ()) if may_hit else ())

    def extend(self, request_id: int, tokens: int) -> list[int] | None:
        self.calls.append("extend")
        fresh = -(-tokens // self.page_size) - len(self.held[request_id]) - self.hits.get(request_id, 0) // 4
        if fresh > len(self.free):
            return None
        pages = [self.free.pop(0) for _ in range(fresh)]
        self.held[request_id] += pages
        return pages

    def publish(self, request_id: int, keys: Sequence[Hashable]) -> None:
        self.calls.append("publish")
        assert len(keys) % self.page_size == 0
        self.published.setdefault(request_id, []).extend(keys)

    def release(self, request_id: int) -> None:
        self.calls.append("release")
        self.free += self.held.pop(request_id)


def make_scheduler(
    kv: FakePages,
    *,
    slots: int = 4,
    budget: int = 16,
    chunk: int | None = None,
    mode: str = "compact",
    keep: int = 6,
    window: int = 4,
    prefix_hits: bool = True,
    ageing_steps: int = 10,
) -> Scheduler:
    """A scheduler of small numbers over `kv`."""
    limits = SchedulerLimits(slots, budget, chunk, ageing_steps, prefix_hits)
    return Scheduler(limits, ReplayPolicy(mode, keep), window, kv, EndRules(STOP, CONTEXT))


def run(scheduler: Scheduler, token: int = 7) -> tuple[Plan, list[Job]]:
    """Plan one step and commit it with the same token for everyone."""
    plan = scheduler.plan()
    assert plan is not None
    return plan, commit(scheduler, plan, token)


def commit(scheduler: Scheduler, plan: Plan, token: int = 7) -> list[Job]:
    """Commit a step with the same token for everyone."""
    return scheduler.commit(plan.number, {span.request_id: [token] for span in plan.spans if span.sample})


def shape(plan: Plan | None) -> list[tuple[int, int, int]]:
    """(request, first, count) of each span."""
    return [] if plan is None else [(span.request_id, span.first, span.count) for span in plan.spans]


__all__ = ["FakePages", "commit", "make_scheduler", "request", "run", "shape"]
