"""Work that runs beside other work where a step is recorded as a CUDA graph.

A decode step of few rows is a chain of short kernels, none of which fills the device; what does not depend on the
kernel before it costs nothing beside it. Launched one by one, kernels wait for the host instead, so nothing is gained.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from functools import cache
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


class Lane(Enum):
    """What runs beside other work; works of one lane wait for each other."""

    STREAMS = auto()
    SHARED_EXPERT = auto()
    QUERIES = auto()
    WINDOWS = auto()


def beside(work: Callable[[], T], lane: Lane) -> Callable[[], T]:
    """Ask for `work`, which launches kernels; calling the result, once, returns what it gave.

    While a graph is recorded, `work` runs at once on the stream of its `lane`; elsewhere at that call.
    It may read what is ready now, which nothing may overwrite before that call.
    """
    initialized = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if not (initialized and torch.cuda.is_current_stream_capturing()):
        return work
    main = torch.cuda.current_stream()
    side = _stream(main.device_index, lane)
    side.wait_stream(main)
    with torch.cuda.stream(side):
        made = work()
    return _Begun(work, made, side.record_event())


@dataclass(frozen=True)
class _Begun(Generic[T]):
    """work: held so that the memory of what it reads is not given to the next tensors of the main stream."""

    work: Callable[[], T]
    made: T
    done: torch.cuda.Event

    def __call__(self) -> T:
        torch.cuda.current_stream().wait_event(self.done)
        return self.made


@cache
def _stream(device: int, lane: Lane) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
