"""The batch-invariant version."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deepinfer.ops.hyper_connections.torch import Mix
from deepinfer.ops.invariance import elementwise, ordered_sum, product, row_sums
from deepinfer.ops.norm.invariant import rms_norm

Array = npt.NDArray[np.float32]


def coefficients(
    x: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm_eps: float, hc_eps: float, iterations: int
) -> Mix:
    """x [N, S, H] of any float dtype, fn FP32 [2S + S*S, S*H], base and scale FP32 [2S + S*S] -> `Mix`."""
    streams = x.shape[1]
    flat = x.flatten(1).float()
    squares, m = row_sums(flat.square()), product(flat, fn.T)
    m.mul_(squares.mul_(1 / flat.shape[1]).add_(norm_eps).sqrt_().reciprocal_())
    z = (m.double() * scale).add_(base).float()  # the product is exact, so this rounds as a fused addition would
    gates = elementwise(Tensor.sigmoid, z)
    mixed = sinkhorn(z[:, 2 * streams :].reshape(-1, streams, streams), iterations, hc_eps)
    return Mix(gates[:, :streams] + hc_eps, 2 * gates[:, streams : 2 * streams], mixed)


def sinkhorn(scores: Tensor, iterations: int, eps: float) -> Tensor:
    """Softmax of rows, then alternating column and row normalisation: FP32 [N, S, S] -> [N, S, S]."""
    heights = elementwise(Tensor.exp, scores - scores.amax(-1, keepdim=True))
    if heights.device.type == "cpu":
        return torch.from_numpy(_balanced_array(heights.numpy(), iterations, eps)).permute(2, 0, 1)
    comb = (heights / ordered_sum(heights, -1)[..., None] + eps).permute(1, 2, 0).contiguous()
    comb.div_(ordered_sum(comb, 0).add_(eps))
    for _ in range(iterations - 1):
        comb.div_(ordered_sum(comb, 1).add_(eps)[:, None])
        comb.div_(ordered_sum(comb, 0).add_(eps))
    return comb.permute(2, 0, 1)


def _balanced_array(heights: Array, iterations: int, eps: float) -> Array:
    """The same [S, S, N] of heights [N, S, S] in NumPy, where hundreds of calls on a few numbers each cost less."""
    comb = np.ascontiguousarray(heights.transpose(1, 2, 0))
    columns, rows = np.empty_like(comb[0]), np.empty_like(comb[:, :1])
    down, across = list(comb), [comb[:, place] for place in range(len(comb))]
    sums, added = rows[:, 0], np.full_like(columns, eps)
    _add_up(across, sums)
    comb /= rows
    comb += added
    _add_up([*down, added], columns)
    comb /= columns
    for _ in range(iterations - 1):
        _add_up([*across, added], sums)
        comb /= rows
        _add_up([*down, added], columns)
        comb /= columns
    return comb


def _add_up(parts: list[Array], total: Array) -> None:
    """One after another, into `total`."""
    np.add(parts[0], parts[1], out=total) if len(parts) > 1 else np.copyto(total, parts[0])
    for part in parts[2:]:
        np.add(total, part, out=total)


def collapse(x: Tensor, pre: Tensor) -> Tensor:
    """`sum_s pre[s] * x[s]`: x [N, S, H], pre FP32 [N, S] -> [N, H] in the dtype of x."""
    return product(pre[:, None], x.float())[:, 0].to(x.dtype)


def expand(y: Tensor, x: Tensor, mix: Mix) -> Tensor:
    """`post[s] * y + sum_r comb[r, s] * x[r]`: y [N, H], x [N, S, H] -> [N, S, H] in the dtype of x."""
    kept = product(mix.comb.transpose(1, 2), x.float())
    return kept.add_(mix.post[:, :, None] * y[:, None].float()).to(x.dtype)


def advance(y: Tensor, x: Tensor, mix: Mix, norm: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """y [N, H], x [N, S, H], norm FP32 [H] -> (`expand`, its normed `collapse` with `mix.pre` [N, H])."""
    streams = expand(y, x, mix)
    return streams, rms_norm(collapse(streams, mix.pre), norm, eps)
