"""One training step as a CUDA graph for each batch shape, and the schedule that picks the next."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Inputs = dict[str, Tensor]
Outputs = dict[str, Tensor]


class CapturedStep:
    """A step function over static inputs; on a GPU it is captured once and replayed."""

    def __init__(self, step: Callable[[Inputs], Outputs], example: Inputs, pool: object | None, device: str) -> None:
        """Runs ``step`` three times on ``example`` as a warm-up, on a GPU then captures it; those updates count."""
        self.inputs = {name: tensor.to(device).clone() for name, tensor in example.items()}
        self._step = step
        self._graph: torch.cuda.CUDAGraph | None = None
        if device == "cpu":
            return
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step(self.inputs)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool):
            self._outputs = step(self.inputs)

    def __call__(self, batch: Inputs) -> Outputs:
        """Copy ``batch`` in and run; the outputs are overwritten by the next call."""
        for name, tensor in batch.items():
            self.inputs[name].copy_(tensor, non_blocking=True)
        if self._graph is None:
            return self._step(self.inputs)
        self._graph.replay()
        return self._outputs


@dataclass(frozen=True)
class Variant:
    """One kind of step: rows of ``tokens`` tokens, attention over all or over the selected positions only."""

    tokens: int
    sparse: bool


Shares = dict[Variant, float]


def from_scratch(progress: float) -> Shares:
    """Which steps to take at a point of training, 0 to 1: short and dense first, long and sparse last."""
    if progress < 0.25:
        return {Variant(1024, False): 1.0}
    if progress < 0.5:
        return {Variant(1024, False): 0.6, Variant(4096, False): 0.4}
    return {
        Variant(1024, False): 0.15,
        Variant(4096, False): 0.1,
        Variant(1024, True): 0.45,
        Variant(4096, True): 0.3,
    }


def recall(progress: float) -> Shares:
    """Steps for weights that are trained already: whole contexts, as inference reads them and in full by turns."""
    return (
        {Variant(4096, False): 0.5, Variant(4096, True): 0.5}
        if progress < 0.4
        else {
            Variant(4096, False): 0.25,
            Variant(4096, True): 0.75,
        }
    )


def variants(shares: Callable[[float], Shares], first: float, last: float) -> list[Variant]:
    """All kinds of steps that a part of a schedule takes."""
    points = (first + (last - first) * share / 100 for share in range(100))
    return list(dict.fromkeys(variant for point in points for variant in shares(point)))


def learning_rate(progress: float, step: int, peak: float) -> float:
    """Linear warm-up over 200 steps, flat to 40%, then linear to 2% of the peak."""
    decay = 1.0 if progress < 0.4 else 1.0 - 0.98 * min(1.0, (progress - 0.4) / 0.6)
    return peak * min(1.0, (step + 1) / 200) * decay
