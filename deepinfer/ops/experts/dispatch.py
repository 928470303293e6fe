"""Chooses the implementation by the arguments."""

from collections.abc import Callable

from torch import Tensor

from deepinfer.ops.experts import torch as reference
from deepinfer.ops.experts.weights import Experts, Fp4Experts
from deepinfer.ops.linear import Fp8Weight, Weight, linear
from deepinfer.ops.platform import accelerated

MOST_EVERYWHERE = 1 << 15
"""Rows times experts up to which, on a GPU, all rows go through all experts that are not in FP4."""


def most_rows(w13: Experts) -> int:
    """How many rows go through these experts on a GPU without a look from the host."""
    return 1 << 62 if isinstance(w13, Fp4Experts) else MOST_EVERYWHERE // len(w13)


def shared_expert(x: Tensor, w13: Weight, w2: Weight, limit: float) -> Tensor:
    """x [N, H], w13 [2I, H], w2 [H, I] -> [N, H]."""
    if accelerated(x) and isinstance(w2, Fp8Weight):
        from deepinfer.ops.experts import triton

        return linear(triton.activate(linear(x, w13), limit), w2)
    return reference.shared_expert(x, w13, w2, limit)


def routed_experts(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    w13: Experts,
    w2: Experts,
    limit: float,
    base: Callable[[], Tensor] | None = None,
) -> Tensor:
    """x [N, H], chosen int64 [N, K], weights FP32 [N, K], w13 [E, 2I, H], w2 [E, H, I], base() [N, H] -> [N, H]."""
    if accelerated(x) and isinstance(w13, Fp4Experts) and isinstance(w2, Fp4Experts):
        from deepinfer.ops.experts import cuda

        return cuda.routed_experts(x, chosen, weights, w13, w2, limit, base)
    whole = x.is_cuda and not isinstance(w13, Fp4Experts) and len(x) <= most_rows(w13)
    routed = (reference.every_expert if whole else reference.routed_experts)(x, chosen, weights, w13, w2, limit)
    return routed if base is None else routed + base()
