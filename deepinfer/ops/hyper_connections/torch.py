"""The PyTorch version: defines the operator, on any device."""

from typing import NamedTuple

import torch
from torch import Tensor

from deepinfer.ops.norm.torch import rms_norm


class Mix(NamedTuple):
    """Mixing coefficients of one site, FP32."""

    pre: Tensor
    post: Tensor
    comb: Tensor


def coefficients(
    x: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm_eps: float, hc_eps: float, iterations: int
) -> Mix:
    """x [N, S, H] of any float dtype, fn FP32 [2S + S*S, S*H], base and scale FP32 [2S + S*S] -> `Mix`."""
    streams = x.shape[1]
    flat = x.flatten(1).float()
    scaled = torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
    z = torch.addcmul(base, torch.nn.functional.linear(flat, fn) * scaled, scale)
    mixed = sinkhorn(z[:, 2 * streams :].view(-1, streams, streams), iterations, hc_eps)
    return Mix(z[:, :streams].sigmoid() + hc_eps, 2 * z[:, streams : 2 * streams].sigmoid(), mixed)


def sinkhorn(scores: Tensor, iterations: int, eps: float) -> Tensor:
    """Softmax of rows, then alternating column and row normalisation: FP32 [N, S, S] -> [N, S, S].

    Works on [S, S, N], rows of the matrix first: forty steps over four by four numbers want long inner loops, few calls
    and no new memory. A product with ones sums and adds eps in one call.
    """
    size, count = scores.shape[1], scores.shape[0]
    comb = (scores.softmax(-1) + eps).permute(1, 2, 0).contiguous()
    flat = comb.view(size, size * count)
    ones, added = comb.new_ones(size, 1, size), comb.new_full((1, 1, 1), eps)
    one, add = ones[0], added[0]
    columns, rows = comb.new_empty(1, size * count), comb.new_empty(size, 1, count)
    flat.div_(torch.addmm(add, one, flat, out=columns))
    for _ in range(iterations - 1):
        comb.div_(torch.baddbmm(added, ones, comb, out=rows))
        flat.div_(torch.addmm(add, one, flat, out=columns))
    return comb.permute(2, 0, 1)


def collapse(x: Tensor, pre: Tensor) -> Tensor:
    """`sum_s pre[s] * x[s]`: x [N, S, H], pre FP32 [N, S] -> [N, H] in the dtype of x."""
    return torch.bmm(pre[:, None], x.float())[:, 0].to(x.dtype)


def expand(y: Tensor, x: Tensor, mix: Mix) -> Tensor:
    """`post[s] * y + sum_r comb[r, s] * x[r]`: y [N, H], x [N, S, H] -> [N, S, H] in the dtype of x."""
    added = mix.post[:, :, None] * y[:, None].float()
    return torch.baddbmm(added, mix.comb.transpose(1, 2), x.float()).to(x.dtype)


def advance(y: Tensor, x: Tensor, mix: Mix, norm: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """y [N, H], x [N, S, H], norm FP32 [H] -> (`expand`, its normed `collapse` with `mix.pre` [N, H])."""
    streams = expand(y, x, mix)
    return streams, rms_norm(collapse(streams, mix.pre), norm, eps)
