"""Chooses the implementation by the arguments."""

from torch import Tensor

from deepinfer.ops.hyper_connections import torch as reference
from deepinfer.ops.hyper_connections.torch import Mix
from deepinfer.ops.platform import accelerated


def coefficients(
    x: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm_eps: float, hc_eps: float, iterations: int
) -> Mix:
    """x [N, S, H] of any float dtype, fn FP32 [2S + S*S, S*H], base and scale FP32 [2S + S*S] -> `Mix`."""
    if accelerated(x) and x.shape[1] == 4:
        from deepinfer.ops.hyper_connections import triton

        return triton.coefficients(x.contiguous(), fn, base, scale, norm_eps, hc_eps, iterations)
    return reference.coefficients(x, fn, base, scale, norm_eps, hc_eps, iterations)


def advance(y: Tensor, x: Tensor, mix: Mix, norm: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """y [N, H], x [N, S, H], norm FP32 [H] -> (streams [N, S, H], input [N, H]) in the dtype of x."""
    if accelerated(x):
        from deepinfer.ops.hyper_connections import triton

        return triton.advance(y, x.contiguous(), mix, norm, eps)
    return reference.advance(y, x, mix, norm, eps)
