"""What an engine has done: requests, tokens, speed, batches, cache."""

import time
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields

from torch import Tensor

from deepinfer.cache.statistics import CacheStatistics
from deepinfer.core.plan import Plan, Span
from deepinfer.engine.scheduler import Job, PictureStatistics, Statistics
from deepinfer.model.experts import ExpertLoads
from deepinfer.speculative.statistics import SpeculationStatistics


@dataclass
class Pace:
    """Rows of prompts or generated tokens, and the seconds they took."""

    rows: int = 0
    seconds: float = 0.0

    @property
    def per_second(self) -> float:
        """Rows a second; 0 before the first."""
        return self.rows / self.seconds if self.seconds else 0.0


class EngineStatistics:
    """Counters since the engine was made; the engine changes them.

    A step that holds prompt rows counts for `prefill` (its prompt rows in its whole time), and so does one that only
    encodes images; any other counts for `decode` (the tokens that requests took).
    """

    def __init__(
        self,
        scheduler: Statistics,
        cache: CacheStatistics,
        loads: ExpertLoads | None = None,
        pictures: PictureStatistics | None = None,
        speculation: SpeculationStatistics | None = None,
    ) -> None:
        self.scheduler, self.cache, self._loads = scheduler, cache, loads
        self.pictures = pictures or PictureStatistics()
        self.speculation = speculation or SpeculationStatistics()
        self.prefill, self.decode = Pace(), Pace()
        self._landed, self._generated = 0.0, 0
        self._decoded = False  # whether the newest step counts for `decode`

    @property
    def expert_visits(self) -> Tensor | None:
        """How often rows chose each expert, int64 [layers, E] on the host; None where nobody counts."""
        return None if self._loads is None else self._loads.visits.to("cpu", copy=True)

    def snapshot(self) -> "EngineStatistics":
        """A copy that can be sent to another process."""
        loads = None if self._loads is None else self._loads.on_host()
        copy = EngineStatistics(deepcopy(self.scheduler), deepcopy(self.cache), loads, deepcopy(self.pictures))
        copy.speculation = deepcopy(self.speculation)
        copy.prefill, copy.decode = deepcopy(self.prefill), deepcopy(self.decode)
        return copy

    def begin(self) -> None:
        """Steps follow, the first of them from now on."""
        self._landed, self._generated, self._decoded = time.perf_counter(), self.scheduler.generated_tokens, False

    def step(self, plan: Plan, jobs: Mapping[int, Job]) -> float | None:
        """Count a step that just came back; `jobs` holds those of its spans.

        Returns the seconds of a decode step; None for the first one behind a prompt, which the work of taking in the
        prompts' tokens has made shorter than it was.
        """
        now, generated = time.perf_counter(), self.scheduler.generated_tokens
        prompt = sum(span.count for span in plan.spans if not _decodes(span, jobs[span.request_id]))
        taken = generated - self._generated
        pace, rows = (self.prefill, prompt) if prompt or not plan.spans else (self.decode, taken)
        pace.rows += rows
        seconds = now - self._landed
        pace.seconds += seconds
        self._landed, self._generated = now, generated
        steady, self._decoded = self._decoded and pace is self.decode, pace is self.decode
        return seconds if steady else None

    def lines(self) -> list[str]:
        """A report for people."""
        jobs, cache = self.scheduler, self.cache
        share = cache.hit_tokens / cache.prompt_tokens if cache.prompt_tokens else 0.0
        misses = ", ".join(f"{reason} {count}" for reason, count in cache.misses.most_common())
        tiers = ", ".join(f"{count} from {tier}" for tier, count in cache.loaded_pages.items())
        lines = [
            f"requests   {jobs.finished} finished, {jobs.failed} failed, {jobs.cancelled} cancelled, "
            f"{jobs.preemptions} preemptions",
            f"tokens     {jobs.prefill_rows} prompt rows, {jobs.generated_tokens} generated",
            f"speed      prefill {self.prefill.per_second:.0f} tokens/s, decode {self.decode.per_second:.1f} tokens/s",
            f"steps      {jobs.steps}, mean {jobs.mean_step:.1f} rows of {jobs.mean_requests:.1f} requests, "
            f"largest {jobs.largest_step} rows",
            f"cache      {cache.hit_tokens} of {cache.prompt_tokens} prompt tokens hit ({share:.0%})"
            + (f"; misses: {misses}" if misses else "")
            + (f"; pages {tiers}" if tiers else ""),
        ]
        lines += self.speculation.lines()
        images = self.pictures
        if images.encoded or images.reused:
            lines.append(
                f"images     {images.encoded} encoded ({images.patches} patches), {images.reused} were there already, "
                f"{images.dropped} dropped"
            )
        return lines


def merged(parts: Sequence[EngineStatistics]) -> EngineStatistics:
    """What several engines have done together; speeds are summed, since they run at the same time."""
    scheduler, cache = Statistics(), CacheStatistics()
    for part in parts:
        for name, value in vars(part.scheduler).items():
            before = getattr(scheduler, name)
            setattr(scheduler, name, max(before, value) if name == "largest_step" else before + value)
        for field in fields(CacheStatistics):
            setattr(cache, field.name, getattr(cache, field.name) + getattr(part.cache, field.name))
    pictures = PictureStatistics(
        *(sum(getattr(part.pictures, field.name) for part in parts) for field in fields(PictureStatistics))
    )
    counted = [part.snapshot()._loads for part in parts]
    loads = counted[0]
    for other in counted[1:]:
        if loads is not None and other is not None:
            loads.add(other)
    result = EngineStatistics(scheduler, cache, loads, pictures)
    for part in parts:
        result.speculation.add(part.speculation)
    for name in ("prefill", "decode"):
        paces = [getattr(part, name) for part in parts]
        rows = sum(pace.rows for pace in paces)
        speed = sum(pace.per_second for pace in paces)
        setattr(result, name, Pace(rows, rows / speed if speed else 0.0))
    return result


def _decodes(span: Span, job: Job) -> bool:
    """Whether the span begins at a generated token; several are run again, like a prompt, after a preemption."""
    return span.token_ids is None or (span.count == 1 and span.first >= len(job.sequence.request.token_ids))
