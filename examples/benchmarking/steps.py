"""Timed steps: prompts' ends behind cached prefixes, and decode steps one behind the other."""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from benchmarking.rig import Rig
from deepinfer.core.plan import Plan, Span
from deepinfer.core.sampled import Sampled

_FIRST = 5
"""The token that decoding begins with, whatever it is."""


@dataclass(frozen=True)
class Timing:
    """steps: how many were timed. rows: of all of them. seconds: all of them together."""

    steps: int
    rows: int
    seconds: float


def prefill_plans(rig: Rig, context: int, new: int, batch: int) -> list[tuple[Span, ...]]:
    """The steps that read the last `new` tokens of as many prompts of `context` tokens as fill a step of `batch` rows.

    Prompts with more than `batch` new tokens are read one by one, in chunks.
    """
    requests = max(1, batch // new)
    prompts = [rig.admit(number, context, new).token_ids for number in range(requests)]
    floor, plans = context - new, []
    for first in range(floor, context, min(batch, new)):
        last = min(first + min(batch, new), context)
        spans = [
            rig.span(number, first, ids[first:last], floor, context, last == context)
            for number, ids in enumerate(prompts)
        ]
        plans.append(tuple(spans))
    return plans


def time_prefill(rig: Rig, plans: list[tuple[Span, ...]], rounds: int) -> Timing:
    """Run all plans once to warm up, then `rounds` times."""
    _run(rig, enumerate(plans))
    begin = time.perf_counter()
    for _ in range(rounds):
        _run(rig, enumerate(plans))
    seconds = time.perf_counter() - begin
    rows = sum(span.count for spans in plans for span in spans)
    return Timing(rounds * len(plans), rounds * rows, seconds)


def time_encoder(rig: Rig, plans: list[tuple[Span, ...]], rounds: int) -> Timing:
    """Encode the images of all plans, without their rows, `rounds` times after once to warm up."""
    work = [rig.encodes(spans) for spans in plans]
    begin = 0.0
    for number in range(rounds + 1):
        if number == 1:
            rig.synchronize()
            begin = time.perf_counter()
        for encodes in work:
            rig.runner.run(Plan(number, (), dropped=tuple(encode.digest for encode in encodes), encodes=encodes))
    rig.synchronize()
    images = sum(len(encodes) for encodes in work)
    return Timing(rounds * len(work), rounds * images, time.perf_counter() - begin)


def decode_plans(rig: Rig, requests: int, context: int, steps: int) -> Iterator[tuple[Span, ...]]:
    """Steps of one row a request, and one for each of its drafts, from position `context` on.

    The first step states its tokens, and with them where the runner finds each request's newest one from then on.
    """
    for number in range(requests):
        rig.admit(number, context)
    for position in range(context, context + steps):
        ids = (_FIRST,) if position == context else None
        yield tuple(rig.span(number, position, ids, 0, context, True) for number in range(requests))


def time_decode(rig: Rig, requests: int, context: int, steps: int, warmup: int) -> Timing:
    """Run `warmup` steps, then `steps` timed ones."""
    plans = list(decode_plans(rig, requests, context, warmup + steps))
    _run(rig, enumerate(plans[:warmup]))
    begin = time.perf_counter()
    _run(rig, enumerate(plans[warmup:]))
    return Timing(steps, steps * requests * (1 + rig.drafts), time.perf_counter() - begin)


def _run(rig: Rig, plans: Iterator[tuple[int, tuple[Span, ...]]]) -> None:
    """As the engine's loop: the tokens of a step come to the host when the next one has been started."""
    flying: deque[Sampled] = deque()
    for number, spans in plans:
        encodes = rig.encodes(spans)
        dropped = tuple(encode.digest for encode in encodes)  # else a second round would find them encoded
        drafting = rig.drafts > 0 and all(span.sample for span in spans)
        flying.append(rig.runner.run(Plan(number, spans, dropped=dropped, encodes=encodes, drafting=drafting)))
        if len(flying) == 2:
            _land(flying.popleft())
    for sampled in flying:
        _land(sampled)
    rig.synchronize()


def _land(sampled: Sampled) -> None:
    """Bring a step's tokens to the host; RuntimeError if a request gave none, as then less ran than was to be timed."""
    if not all(sampled.lists()):
        raise RuntimeError("a step left out some of its requests: its time says nothing")


def profile(rig: Rig, plans: Sequence[tuple[Span, ...]], lines: int = 40) -> str:
    """A table of the kernels of the last of some steps, by their time."""
    _run(rig, enumerate(plans[:-1]))
    activities = [torch.profiler.ProfilerActivity.CPU]
    if rig.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as measured:
        _run(rig, enumerate(plans[-1:]))
    order = "self_cuda_time_total" if rig.device.type == "cuda" else "self_cpu_time_total"
    return str(measured.key_averages().table(sort_by=order, row_limit=lines, max_name_column_width=60))
