"""How long a device waits between the steps of the engine's asynchronous loop."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from benchmarking.rig import Rig
from deepinfer.core.plan import Admitted, Plan
from deepinfer.core.request import Request
from deepinfer.core.sampling_params import SamplingParams
from deepinfer.engine.loop import run_ahead
from deepinfer.engine.replay import ReplayPolicy
from deepinfer.engine.scheduler import EndRules, Job, Scheduler, SchedulerLimits

_KERNELS_APART = 100.0
"""Microseconds between kernels of one recording, at most: the profiler that looks on makes them some 25."""


class FilledPages:
    """Pages of caches that hold plausible entries everywhere: all of a prompt but its last token counts as cached."""

    def __init__(self, pages: int, each: int, page_size: int) -> None:
        """`each`: pages that a request gets, for good."""
        self.page_size, self.total_pages, self._each = page_size, pages, each
        self._held: dict[int, tuple[int, ...]] = {}

    @property
    def available_pages(self) -> int:
        """Pages of nobody."""
        return self.total_pages - self._each * len(self._held)

    def admit(
        self, request_id: int, keys: Sequence[Hashable], tokens: int, *, spare: int, may_hit: bool
    ) -> Admitted | None:
        """The request's own pages."""
        first = self._each * len(self._held)
        self._held[request_id] = tuple(range(first, first + self._each))
        hit = (tokens - 1) // self.page_size * self.page_size if may_hit else 0
        return Admitted(self._held[request_id], hit, None if hit else "too short")

    def extend(self, request_id: int, tokens: int) -> Sequence[int] | None:
        """There are no more."""
        return None

    def publish(self, request_id: int, keys: Sequence[Hashable]) -> None:
        """Nobody shares."""

    def release(self, request_id: int) -> None:
        """No other request comes."""


@dataclass(frozen=True)
class Idle:
    """steps: decode steps seen. share: of their time in which nothing ran on the device. longest: microseconds."""

    steps: int
    share: float
    longest: float


def measure_idle(rig: Rig, requests: int, context: int, steps: int) -> Idle:
    """Decode `steps` tokens of `requests` requests in the asynchronous loop; RuntimeError if they do not run together.

    This is done twice: the first time steps of new shapes are recorded.
    """
    _loop(rig, requests, context, steps)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        decoded = _loop(rig, requests, context, steps)
    if not decoded:
        raise RuntimeError("no step decoded all requests: there is no time between such steps")
    ranges = [(one.time_range.start, one.time_range.end) for one in seen.events() if _on_device(one)]
    return _gaps(sorted(ranges), decoded)


def _loop(rig: Rig, requests: int, context: int, steps: int) -> int:
    """Decode once; returns how many steps ran all requests."""
    caches = rig.caches
    each = caches.pages // caches.slots
    limits = SchedulerLimits(requests, max(8192, requests * (1 + rig.drafts)), drafts=rig.drafts)
    pages = FilledPages(caches.pages, each, caches.page_size)
    config = rig.config
    ends = EndRules(config.eos_token_id, config.max_position_embeddings)
    scheduler = Scheduler(limits, ReplayPolicy("compact", rig.replay), config.sliding_window, pages, ends)
    params = SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True)
    for number in range(requests):
        made = rig.admit(number, context)
        request = Request(number, None, made.token_ids, made.token_types, (), params, 0)
        rig.runner.admit(scheduler.add(request), request)
    decoded = 0

    def landed(plan: Plan, jobs: Sequence[Job]) -> None:
        nonlocal decoded
        for job in jobs:
            if job.error is not None:
                raise job.error
        decoded += len(plan.spans) == requests and all(span.token_ids is None for span in plan.spans)

    run_ahead(scheduler, rig.runner, landed)
    rig.synchronize()
    return decoded


def _on_device(event: torch.autograd.profiler_util.FunctionEvent) -> bool:
    return bool(event.device_type == torch.autograd.DeviceType.CUDA)


def _gaps(ranges: Sequence[tuple[float, float]], steps: int) -> Idle:
    """Of the second half of what ran: prompts lie in the first."""
    middle = (ranges[0][0] + ranges[-1][1]) / 2
    seen = [one for one in ranges if one[0] >= middle]
    end, idle, longest = seen[0][0], 0.0, 0.0
    for first, last in seen:
        gap = first - end
        if gap > _KERNELS_APART:
            idle, longest = idle + gap, max(longest, gap)
        end = max(end, last)
    return Idle(steps, idle / (end - seen[0][0]), longest)
