"""Routed experts as grouped matrix products over rows sorted by expert."""

from typing import Any

import torch
from torch import Tensor

from deepinfer.reference import experts
from deepinfer.reference.experts import MixtureOfExperts
from train.operators import OPS, STATE


class Permute(torch.autograd.Function):
    """Rows of x [N, C] in another order, with the inverse order as the gradient's (an index's gradient would sort)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        """x[order]."""
        ctx.save_for_backward(inverse)
        return x[order]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """grad[inverse]."""
        return grads[0][ctx.saved_tensors[0]], None, None


def fast_routed_experts(
    x: Tensor, chosen: Tensor, weights: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, limit: float
) -> Tensor:
    """See `experts.routed_experts`: rows sorted by expert, one grouped product for each weight."""
    count, per_token = len(w1), chosen.shape[1]
    order = chosen.flatten().argsort(stable=True)
    sorted_experts = chosen.flatten()[order]
    ends = torch.searchsorted(sorted_experts, torch.arange(count, device=x.device), right=True).to(torch.int32)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
    rows = Permute.apply(x[:, None].expand(-1, per_token, -1).reshape(-1, x.shape[1]), order, back)
    products = [OPS.grouped_mm(rows, w.to(x.dtype).transpose(1, 2), ends) for w in (w1, w3)]
    inner = OPS.swiglu_weighted(*products, weights.flatten()[order], limit)
    out = OPS.grouped_mm(inner, w2.to(x.dtype).transpose(1, 2), ends)
    return Permute.apply(out, back, order).view(len(x), per_token, -1).float().sum(1).to(x.dtype)


def fast_mixture(self: MixtureOfExperts, h: Tensor, is_image: Tensor) -> Tensor:
    """See `MixtureOfExperts.forward`; also counts each expert's rows, text and image tokens apart."""
    rows, images = h.flatten(0, -2), is_image.flatten()
    scores, bias = self.gate(rows, images)
    chosen, weights = experts.route(scores, bias, self.per_token, self.scaling, self.normalise)
    with torch.no_grad():
        hits = (chosen[..., None] == torch.arange(scores.shape[1], device=h.device)).any(1)
        load = torch.stack(((hits & ~images[:, None]).sum(0), (hits & images[:, None]).sum(0))).float()
    STATE.loads.append((self.gate, load))
    return self.experts(rows, chosen, weights).view_as(h) + self.shared_experts(h)
