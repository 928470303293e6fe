"""Mixture of experts: a bias-corrected router, routed experts and one shared expert."""

import torch
from torch import Tensor, nn

from deepinfer.config.model import ModelConfig
from deepinfer.reference.norm import Linear


def swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """``silu(min(gate, limit)) * clip(up, -limit, limit)`` in FP32; [..., I] and [..., I] -> FP32 [..., I]."""
    return nn.functional.silu(gate.float().clamp(max=limit)) * up.float().clamp(-limit, limit)


def route(scores: Tensor, bias: Tensor, count: int, scaling: float, normalise: bool) -> tuple[Tensor, Tensor]:
    """Choose ``count`` experts a row: ``scores`` FP32 [N, E], ``bias`` [N, E] -> (chosen [N, count], weights).

    The bias takes part in the choice only; the weights are the chosen scores, normalised to sum to ``scaling``.
    """
    chosen = (scores + bias).topk(count, dim=-1).indices
    weights = scores.gather(-1, chosen)
    if normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return chosen, weights * scaling


def routed_experts(
    x: Tensor, chosen: Tensor, weights: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, limit: float
) -> Tensor:
    """Weighted sum of the chosen experts: ``x`` [N, H], ``chosen``/``weights`` [N, K] -> [N, H].

    ``w1``, ``w3`` [E, I, H] and ``w2`` [E, H, I]. The routing weight multiplies before ``w2``.
    """
    out = torch.zeros_like(x, dtype=torch.float32)
    for expert in range(len(w1)):
        rows, slot = (chosen == expert).nonzero(as_tuple=True)
        if len(rows) == 0:
            continue
        picked = x[rows]
        inner = swiglu(picked @ w1[expert].to(x.dtype).T, picked @ w3[expert].to(x.dtype).T, limit)
        inner = (inner * weights[rows, slot, None]).to(x.dtype)
        out = out.index_add(0, rows, (inner @ w2[expert].to(x.dtype).T).float())
    return out.to(x.dtype)


class Router(nn.Module):
    """Scores ``sqrt(softplus(weight h))`` with one selection bias for text tokens and one for image tokens."""

    def __init__(self, config: ModelConfig, experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, config.hidden_size))
        self.bias = nn.Parameter(torch.zeros(experts))
        self.bias_vl = nn.Parameter(torch.zeros(experts))

    def forward(self, h: Tensor, is_image: Tensor) -> tuple[Tensor, Tensor]:
        """``h`` [N, H], ``is_image`` bool [N] -> (FP32 scores [N, E], selection bias [N, E])."""
        scores = nn.functional.softplus(nn.functional.linear(h.float(), self.weight.float())).sqrt()
        return scores, torch.where(is_image[:, None], self.bias_vl, self.bias)


class SharedExpert(nn.Module):
    """The expert that every token visits."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.w1 = Linear(config.hidden_size, config.moe_intermediate_size)
        self.w2 = Linear(config.moe_intermediate_size, config.hidden_size)
        self.w3 = Linear(config.hidden_size, config.moe_intermediate_size)
        self.limit = config.swiglu_limit

    def forward(self, h: Tensor) -> Tensor:
        """[..., H] -> [..., H], dtype kept."""
        return self.w2(swiglu(self.w1(h), self.w3(h), self.limit).to(h.dtype))


class RoutedExperts(nn.Module):
    """The routed experts' weights, stacked over experts (a checkpoint stores each apart)."""

    def __init__(self, config: ModelConfig, experts: int) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.moe_intermediate_size
        self.w1 = nn.Parameter(torch.empty(experts, inner, hidden))
        self.w2 = nn.Parameter(torch.empty(experts, hidden, inner))
        self.w3 = nn.Parameter(torch.empty(experts, inner, hidden))
        self.limit = config.swiglu_limit

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """See `routed_experts`."""
        return routed_experts(x, chosen, weights, self.w1, self.w2, self.w3, self.limit)


class MixtureOfExperts(nn.Module):
    """Router, routed experts and shared expert of one layer or draft stage."""

    def __init__(self, config: ModelConfig, experts: int, per_token: int) -> None:
        super().__init__()
        self.gate = Router(config, experts)
        self.experts = RoutedExperts(config, experts)
        self.shared_experts = SharedExpert(config)
        self.per_token = per_token
        self.scaling, self.normalise = config.routed_scaling_factor, config.norm_topk_prob

    def forward(self, h: Tensor, is_image: Tensor) -> Tensor:
        """``h`` [B, T, H], ``is_image`` bool [B, T] -> [B, T, H]."""
        rows = h.flatten(0, -2)
        scores, bias = self.gate(rows, is_image.flatten())
        chosen, weights = route(scores, bias, self.per_token, self.scaling, self.normalise)
        return self.experts(rows, chosen, weights).view_as(h) + self.shared_experts(h)
