"""Drives a scheduler with the simulated device, in any interleaving, and checks the rules of a plan after each step."""

import random
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from scheduler_device import STOP, Device, reply

from deepinfer.cache.manager import KVManager
from deepinfer.cache.tiers import HostTier
from deepinfer.core.plan import Admitted, Plan, Span, Verification
from deepinfer.core.request import Request
from deepinfer.core.sampling_params import SamplingParams
from deepinfer.engine.replay import ReplayPolicy
from deepinfer.engine.scheduler import EndRules, Job, Phase, Scheduler, SchedulerLimits

CONTEXT = 200


@dataclass
class AnyDrafts:
    """Verifies any number of drafts, and drafts or does not, as it comes."""

    depth: int
    seed: int = 0

    def decide(self, chances: Sequence[Sequence[float] | None]) -> Verification:
        draw = random.Random(self.seed)
        self.seed += 1
        total = draw.choice([None, 0, 1, draw.randint(0, self.depth * (1 + len(chances)))])
        return Verification(self.depth, total, draw.random() < 0.8, True)

    def observe(self, rows: int, drafted: int, seconds: float) -> None:
        pass


def request(prompt: Sequence[int], max_tokens: int | None = 8, priority: int = 0) -> Request:
    """A text request for the simulated model."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    return Request(0, None, tuple(prompt), (-1,) * len(prompt), (), params, 0, priority=priority)


class Guard(KVManager):
    """The engine's page manager, watched: pages must not come back while a step in flight uses them."""

    def __init__(self, pages: int, page_size: int, device: Device, tiers: Sequence[HostTier]) -> None:
        super().__init__(pages, page_size, "simulated", device, tiers)
        self.in_flight: deque[Plan] = deque()
        self.held: dict[int, list[int]] = {}

    def admit(self, request_id, keys, tokens, *, spare=0, may_hit=True) -> Admitted | None:
        admitted = super().admit(request_id, keys, tokens, spare=spare, may_hit=may_hit)
        if admitted is not None:
            self.held[request_id] = list(admitted.pages)
        return admitted

    def extend(self, request_id: int, tokens: int) -> list[int] | None:
        pages = super().extend(request_id, tokens)
        self.held[request_id].extend(pages or ())
        return pages

    def release(self, request_id: int) -> None:
        users = {span.request_id for plan in self.in_flight for span in plan.spans}
        assert request_id not in users, "pages released while a step in flight uses them"
        del self.held[request_id]
        super().release(request_id)


@dataclass
class Harness:
    """A scheduler, its pages, a device, and a record of what became of each request."""

    limits: SchedulerLimits
    pages: int = 16
    page_size: int = 4
    window: int = 4
    mode: str = "compact"
    keep: int = 6
    host_pages: int = 0
    errs: int = 3
    variable: bool = False
    ends: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        slots, depth = self.limits.max_num_seqs, self.limits.drafts
        self.device = Device(slots, self.pages, self.page_size, self.window, depth, self.errs)
        tiers = [HostTier(self.host_pages * self.page_size * 8)] if self.host_pages else []
        self.kv = Guard(self.pages, self.page_size, self.device, tiers)
        replay = ReplayPolicy(self.mode, self.keep)
        policy = AnyDrafts(depth) if self.variable and depth else None
        self.scheduler = Scheduler(self.limits, replay, self.window, self.kv, EndRules(STOP, CONTEXT), policy=policy)
        self.replay = replay
        self.requests = self.device.requests
        self.jobs: dict[int, Job] = {}
        self.results: deque[tuple[Plan, dict[int, list[int]], bool]] = deque()
        self.decoding: set[int] = set()
        self.loads = 0
        self.arrivals: dict[int, int] = {}
        self.starts: dict[int, int] = {}

    def add(self, prompt: Sequence[int], max_tokens: int | None = 8, priority: int = 0) -> int:
        """Add a request."""
        new = request(prompt, max_tokens, priority)
        request_id = self.scheduler.add(new)
        self.requests[request_id] = new
        self.arrivals[request_id] = self.device.next_number
        return request_id

    def cancel(self, request_id: int) -> None:
        """Cancel a request; it must succeed exactly if the request has not ended."""
        job = self.scheduler.cancel(request_id)
        assert (job is None) == (request_id in self.ends)
        if job is not None:
            self._end(job, "cancelled")

    def launch(self, broken: bool = False) -> bool:
        """Plan a step and run it; False if there is nothing to run now."""
        plan = self.scheduler.plan()
        if plan is None:
            return False
        self._check(plan)
        self.loads += len(plan.loads)
        self.kv.in_flight.append(plan)
        self.results.append((plan, self.device.run(plan, broken), broken))
        return True

    def land(self, guilty: Collection[int] | None = None) -> None:
        """Give back the oldest step."""
        plan, tokens, broken = self.results.popleft()
        self.kv.in_flight.popleft()
        if broken:
            lost = self.scheduler.fail(plan.number, RuntimeError("injected"), guilty)
            for job in lost:
                assert str(job.error) == "injected"
                self._end(job, "error")
            self.decoding.difference_update(span.request_id for span in plan.spans)
        else:
            for job in self.scheduler.commit(plan.number, tokens):
                self.jobs[job.request_id] = job
                if job.phase is Phase.ENDED:
                    self._end(job, job.sequence.finish_reason or "?")
        self.kv.check_integrity()

    def step(self, ahead: int = 0) -> bool:
        """Launch one step, then give steps back until `ahead` are in flight; False if nothing happened."""
        launched = self.launch()
        landed = False
        while len(self.results) > (ahead if launched else 0):
            self.land()
            landed = True
        return launched or landed

    def drain(self, ahead: int = 0, most: int = 10_000) -> None:
        """Run until everything has ended, and check what is left behind."""
        for _ in range(most):
            if not self.scheduler.has_work():
                break
            assert self.step(ahead), "work to do, but nothing happens"
        assert not self.scheduler.has_work(), "requests starve"
        assert not self.results
        self.check_empty()

    def check_empty(self) -> None:
        """Nothing may be held, and each request must have ended once."""
        scheduler = self.scheduler
        assert (scheduler.num_waiting, scheduler.num_running) == (0, 0)
        assert self.kv.available_pages == self.pages
        assert set(self.ends) == set(self.requests)
        assert scheduler.statistics.ended == scheduler.statistics.added == len(self.requests)

    def expected(self, request_id: int) -> list[int]:
        """What a request must generate if nothing stops it."""
        made = self.requests[request_id]
        length = len(made.token_ids)
        room = min(CONTEXT - length, self.pages * self.page_size + 1 - length)
        return reply(made.token_ids, min(room, made.params.max_tokens or room))

    def _end(self, job: Job, how: str) -> None:
        assert job.request_id not in self.ends, "a request ended twice"
        assert job.phase is Phase.ENDED
        self.ends[job.request_id] = how
        self.jobs[job.request_id] = job
        expected, generated = self.expected(job.request_id), job.sequence.generated
        assert generated == expected[: len(generated)]
        if how in ("stop", "length"):
            assert generated == expected
            assert how == ("stop" if generated[-1] == STOP else "length")

    def _check(self, plan: Plan) -> None:
        """The rules that a plan keeps whatever the state."""
        assert 1 <= plan.rows <= self.limits.max_num_batched_tokens
        assert len({span.request_id for span in plan.spans}) == len(plan.spans)
        assert len({span.slot for span in plan.spans}) == len(plan.spans) <= self.limits.max_num_seqs
        decodes = [span.request_id in self.decoding and span.first != span.floor for span in plan.spans]
        assert decodes == sorted(decodes, reverse=True), "decode spans come first"
        for span, decode in zip(plan.spans, decodes, strict=True):
            self._check_span(plan, span, decode)
        self._check_pages(plan)

    def _check_span(self, plan: Plan, span: Span, decode: bool) -> None:
        assert span.request_id not in self.ends, "rows for a request that has ended"
        start = self.replay.start(len(self.requests[span.request_id].token_ids))
        assert span.cut == start
        assert span.decoder_from == (start if self.mode == "compact" else 0)
        if decode:
            assert span.count <= 1 + self.limits.drafts
            assert span.sample
        elif self.limits.max_chunk:
            assert span.count <= self.limits.max_chunk
        if span.first == span.floor:
            assert span.floor == max(0, min(span.write_from, start) - self.window)
            assert span.slot in plan.pages
            users = {(other.slot, other.request_id) for flight in self.kv.in_flight for other in flight.spans}
            assert all(user == span.request_id for slot, user in users if slot == span.slot), "the slot is in use"
            self.starts.setdefault(span.request_id, plan.number)
        (self.decoding.add if span.sample else self.decoding.discard)(span.request_id)
        assert min(span.end, span.limit) <= len(self.kv.held[span.request_id]) * self.page_size, "rows without pages"

    def _check_pages(self, plan: Plan) -> None:
        by_slot = {span.slot: span for span in plan.spans}
        for slot, pages in plan.pages.items():
            assert list(pages) == self.kv.held[by_slot[slot].request_id]
        holders = [page for pages in self.kv.held.values() for page in pages]
        for span in plan.spans:
            pages = self.kv.held[span.request_id]
            first = max(span.first, span.write_from)
            for position in range(first, min(span.end, span.limit)):
                assert holders.count(pages[position // self.page_size]) == 1, "a shared page would be written"
