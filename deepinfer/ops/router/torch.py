"""The PyTorch version: defines the operator, on any device."""

from torch import Tensor
from torch.nn import functional

from deepinfer.ops.linear import wide_linear


def route(h: Tensor, weight: Tensor, bias: Tensor, count: int, scaling: float) -> tuple[Tensor, Tensor]:
    """h [N, H] of any float dtype -> (chosen experts int64 [N, count], weights FP32 [N, count])."""
    scores = functional.softplus(wide_linear(h, weight)).sqrt()
    chosen = (scores + bias).topk(count, dim=-1).indices
    weights = scores.gather(-1, chosen)
    return chosen, weights / (weights.sum(-1, keepdim=True) + 1e-20) * scaling
