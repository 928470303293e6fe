"""The batch-invariant version: of equal scores the lower expert wins."""

from torch import Tensor
from torch.nn import functional

from deepinfer.ops.invariance import elementwise, ordered_sum
from deepinfer.ops.linear.invariant import wide_linear


def route(h: Tensor, weight: Tensor, bias: Tensor, count: int, scaling: float) -> tuple[Tensor, Tensor]:
    """h [N, H] of any float dtype -> (chosen experts int64 [N, count], weights FP32 [N, count])."""
    scores = elementwise(functional.softplus, wide_linear(h, weight)).sqrt()
    chosen = (scores + bias).argsort(stable=True, dim=-1, descending=True)[:, :count]
    weights = scores.gather(-1, chosen)
    return chosen, weights / (ordered_sum(weights, -1)[:, None] + 1e-20) * scaling
