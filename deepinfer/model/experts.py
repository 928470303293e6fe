"""The mixture of experts of one layer: router, routed experts, shared expert."""

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from deepinfer.config.model import ModelConfig
from deepinfer.model.weights import ExpertWeights
from deepinfer.ops.beside import Lane, beside
from deepinfer.ops.experts import routed_experts, shared_expert
from deepinfer.ops.router import route


class Finish(Protocol):
    """Waits for what routed experts give."""

    def __call__(self, base: Callable[[], Tensor] | None = None) -> Tensor:
        """The results [M, H], added to what `base` gives [M, H] if there is one; it is called as late as serves."""


class RoutedExperts(Protocol):
    """Does what `deepinfer.ops.experts.routed_experts` does, wherever the experts lie."""

    def __call__(self, h: Tensor, chosen: Tensor, routing: Tensor, weights: ExpertWeights, limit: float) -> Finish:
        """Begin, and return what waits for the result; between the two the caller computes something else."""


def local_experts(h: Tensor, chosen: Tensor, routing: Tensor, weights: ExpertWeights, limit: float) -> Finish:
    """All experts lie here."""

    def finish(base: Callable[[], Tensor] | None = None) -> Tensor:
        return routed_experts(h, chosen, routing, weights.w13, weights.w2, limit, base)

    return finish


class ExpertLoads:
    """Counts how often the rows of each layer chose each expert: visits, int64 [layers, E] on the device."""

    def __init__(self, layers: int, experts: int, device: torch.device | str) -> None:
        self.visits = torch.zeros(layers, experts, dtype=torch.int64, device=device)

    def on_host(self) -> "ExpertLoads":
        """A copy on the host."""
        layers, experts = self.visits.shape
        copy = ExpertLoads(layers, experts, "cpu")
        copy.add(self)
        return copy

    def add(self, other: "ExpertLoads") -> None:
        """Count what others counted, too."""
        self.visits += other.visits.to(self.visits.device)

    def counted(self, layer: int, routed: RoutedExperts) -> RoutedExperts:
        """Do as `routed`, and count."""
        row = self.visits[layer]

        def run(h: Tensor, chosen: Tensor, routing: Tensor, weights: ExpertWeights, limit: float) -> Finish:
            row.scatter_add_(0, chosen.flatten(), torch.ones_like(chosen).flatten())
            return routed(h, chosen, routing, weights, limit)

        return run


def mixture(
    h: Tensor,
    is_image: Tensor | None,
    per_token: int,
    weights: ExpertWeights,
    config: ModelConfig,
    routed: RoutedExperts = local_experts,
) -> Tensor:
    """h: normed rows [M, H] -> [M, H]. is_image: bool [M], rows that choose by the image bias; None: none do."""
    bias = weights.bias
    if is_image is not None:
        bias = torch.where(is_image[:, None], weights.image_bias, bias)
    shared = beside(
        partial(shared_expert, h, weights.shared_w13, weights.shared_w2, config.swiglu_limit), Lane.SHARED_EXPERT
    )
    chosen, routing = route(h, weights.gate, bias, per_token, config.routed_scaling_factor)
    return routed(h, chosen, routing, weights, config.swiglu_limit)(shared)
