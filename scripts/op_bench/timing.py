"""Device time of calls, and the bounds that they are held to."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

BYTES_PER_S = 4.25e12
"""Measured copy bandwidth of an H200."""
RATES = {"fp8": 1.24e15, "fp16": 0.70e15, "fp32": 0.06e15}
"""Measured products of an H200, operations a second; FP32 by its data sheet."""


@dataclass(frozen=True)
class Work:
    """What an operator has to do at least: bytes to move, operations of a type."""

    moved: float
    operations: float = 0.0
    rate: str = "fp8"

    @property
    def bound_us(self) -> float:
        """The larger of the two times."""
        return max(self.moved / BYTES_PER_S, self.operations / RATES[self.rate]) * 1e6


@dataclass(frozen=True)
class Prepared:
    """A case ready to run. calls: the same call on different buffers, which together exceed the L2 where that matters.

    error: compares with the PyTorch operator; relative, or the share that differs.
    """

    calls: Sequence[Callable[[], Any]]
    error: Callable[[], float]


@dataclass(frozen=True)
class Case:
    """One operator at one shape. limit: largest error that is a rounding."""

    operator: str
    regime: str
    work: Work
    limit: float
    prepare: Callable[[], Prepared]


def graph_us(calls: Sequence[Callable[[], Any]], replays: int = 9, warm_ms: float = 50.0) -> float:
    """Median device time of one call in microseconds, all captured in one CUDA graph.

    The graph is replayed for `warm_ms` before: an idle card clocks down and needs some tens of milliseconds of work.
    """
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
        once = _replays(graph, stream, 1)[0]
        for _ in range(int(warm_ms / max(once, 0.01)) + 1):
            graph.replay()
        times = sorted(_replays(graph, stream, replays))
    return times[len(times) // 2] * 1e3 / len(calls)


def _replays(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, count: int) -> list[float]:
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    marks[0].record(stream)
    for mark in marks[1:]:
        graph.replay()
        mark.record(stream)
    marks[-1].synchronize()
    return [before.elapsed_time(after) for before, after in pairwise(marks)]


def relative(made: torch.Tensor, wanted: torch.Tensor) -> float:
    """||made - wanted|| / ||wanted||; NaN where anything is not finite."""
    made, wanted = made.double(), wanted.double()
    return ((made - wanted).norm() / wanted.norm()).item() if bool(made.isfinite().all()) else float("nan")
