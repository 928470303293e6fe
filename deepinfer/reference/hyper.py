"""Manifold-constrained hyper-connections (mHC), single pass: several residual streams mixed per token."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from deepinfer.config.model import ModelConfig


class Mix(NamedTuple):
    """Mixing coefficients of one site, FP32. S is the number of streams."""

    pre: Tensor  # [..., S]: weights of the next site's collapse
    post: Tensor  # [..., S]: how much of the sub-layer's output each stream takes
    comb: Tensor  # [..., S, S]: old stream (row) to new stream (column), doubly stochastic


def sinkhorn(scores: Tensor, iterations: int, eps: float) -> Tensor:
    """Make [..., S, S] (nearly) doubly stochastic: softmax of rows, then alternating column and row normalisation."""
    comb = scores.softmax(-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return comb


def coefficients(
    x: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm_eps: float, hc_eps: float, iterations: int
) -> Mix:
    """Coefficients from the streams ``x`` [..., S, H] as they stand; ``fn`` [2S + S*S, S*H], ``base`` [2S + S*S].

    Projects first, then normalises, all in FP32; ``scale`` [3] weighs the three parts in one fused multiply-add.
    """
    streams = x.shape[-2]
    flat = x.float().flatten(-2)
    projected = nn.functional.linear(flat, fn) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
    parts = (streams, streams, streams * streams)
    weights = torch.cat([scale[i : i + 1].expand(n) for i, n in enumerate(parts)])
    z = torch.addcmul(base.expand_as(projected), projected, weights.expand_as(projected))
    pre, post, comb = z.split(parts, dim=-1)
    mixed = sinkhorn(comb.unflatten(-1, (streams, streams)), iterations, hc_eps)
    return Mix(pre.sigmoid() + hc_eps, 2 * post.sigmoid(), mixed)


def collapse(x: Tensor, pre: Tensor) -> Tensor:
    """``sum_s pre[s] * x[s]``: [..., S, H] and [..., S] -> [..., H], summed in FP32, in the dtype of ``x``."""
    return (x.float() * pre[..., None]).sum(-2).to(x.dtype)


def expand(y: Tensor, x: Tensor, mix: Mix) -> Tensor:
    """``post[s] * y + sum_r comb[r, s] * x[r]``: the streams [..., S, H] after a sub-layer gave ``y`` [..., H]."""
    carried = torch.einsum("...rs,...rh->...sh", mix.comb, x.float())
    return (mix.post[..., None] * y.float()[..., None, :] + carried).to(x.dtype)


class HyperConnection(nn.Module):
    """The coefficient map of one site; its tensors are stored as ``hc_attn_*`` or ``hc_ffn_*`` of their layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        streams = config.hc_mult
        count = 2 * streams + streams * streams
        self.fn = nn.Parameter(torch.zeros(count, streams * config.hidden_size))
        self.base = nn.Parameter(torch.zeros(count))
        self.scale = nn.Parameter(torch.ones(3))
        self.norm_eps, self.hc_eps, self.iterations = config.rms_norm_eps, config.hc_eps, config.hc_sinkhorn_iters

    def forward(self, x: Tensor) -> Mix:
        """[..., S, H] -> `Mix`."""
        return coefficients(x, self.fn, self.base, self.scale, self.norm_eps, self.hc_eps, self.iterations)
