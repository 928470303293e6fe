"""Work of fixed shapes: recorded once as a CUDA graph and replayed, so that it costs one launch."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

SIZES = (
    1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384,
    448, 512, 640, 768, 1024, 1280, 1536,
)  # fmt: skip
"""Numbers of rows or blocks that work is recorded for; more are run as they come."""


def size_for(count: int) -> int:
    """The least of `SIZES` that holds `count`, which is at most the largest."""
    return SIZES[bisect_left(SIZES, count)]


class Recorder:
    """Records work whose inputs lie in tensors that it was made with; only one recording may run at a time.

    What a recording returns stays valid until another one of the same recorder runs: they share their memory.
    """

    def __init__(self, record: bool) -> None:
        """Without `record` everything is run anew each time: to test without a GPU."""
        self._record = record
        self._pool: Any = None
        self.recordings = 0  # so far

    def record(self, work: Callable[[], T], kept: Sequence[Tensor] = ()) -> Callable[[], T]:
        """What carries `work` out from now on.

        The work is run once before: kernels are compiled, libraries choose theirs. kept: tensors that it changes in
        such a way that running it again would not give the same; they are put back.
        """
        if not self._record:
            return work
        before = [tensor.clone() for tensor in kept]
        work()
        for tensor, value in zip(kept, before, strict=True):
            tensor.copy_(value)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            made = work()
        self._pool = self._pool or graph.pool()
        self.recordings += 1

        def replay() -> T:
            graph.replay()
            return made

        return replay
