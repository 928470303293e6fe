"""Hyper-connections (mHC): several residual streams, mixed per token around every sub-layer.

Contract. `coefficients(x [N, S, H], fn FP32 [2S + S*S, S*H], base, scale FP32 [2S + S*S], ...)` projects the streams as
they stand, then normalises, and gives a `Mix` (FP32): `pre` [N, S] weighs the streams in the NEXT site's `collapse`,
`post` [N, S] is how much of the sub-layer's output each stream takes, `comb` [N, S, S] carries old streams (rows) to
new ones (columns) and is nearly doubly stochastic (Sinkhorn). `collapse` and `expand` sum in FP32 and keep the dtype
of the streams. `advance(y, x, mix, norm FP32 [H], eps) -> (streams, input)` is `expand` and what the next site reads,
`collapse` with `mix.pre` and a norm. Rows are independent.
"""

from deepinfer.ops.choice import choose
from deepinfer.ops.hyper_connections import dispatch, invariant
from deepinfer.ops.hyper_connections import torch as plain
from deepinfer.ops.hyper_connections.torch import Mix

advance = choose(dispatch.advance, invariant.advance)
coefficients = choose(dispatch.coefficients, invariant.coefficients)
collapse = choose(plain.collapse, invariant.collapse)
expand = choose(plain.expand, invariant.expand)
sinkhorn = choose(plain.sinkhorn, invariant.sinkhorn)

__all__ = ["Mix", "advance", "coefficients", "collapse", "expand", "sinkhorn"]
