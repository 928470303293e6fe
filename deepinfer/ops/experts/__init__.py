"""Gated experts: the routed ones, of which a row visits a few, and the shared one that all rows visit.

Contract. An expert is `w2(silu(min(gate, L)) * clip(up, -L, L))` where `w13` holds the rows of gate, then of up; the
activation is FP32 and cast before `w2`. `routed_experts(x [N, H], chosen [N, K], weights FP32 [N, K], w13 [E, 2I, H],
w2 [E, H, I], limit, base or None) -> [N, H]` multiplies by the routing weight before `w2`, sums the K results in FP32
in the order of `chosen` (which is `combine`) and adds what `base` gives, [N, H], so a row's result does not depend on
its neighbours' choices. `shared_expert` is one expert with weight 1. Everything is in the dtype of `x`, weights
included.

Weights may also be kept quantised: `Fp8Weight` (see `ops.linear`) or, for the routed experts, `Fp4Experts`, which holds
FP4 codes in the order a GPU reads them. Then the inputs of both products are rounded to E4M3 with a scale a row, the
activation is cast to the dtype of `x` before that, and the routing weight multiplies the second product's FP32 sums.
"""

from deepinfer.ops.choice import choose
from deepinfer.ops.experts import dispatch, invariant
from deepinfer.ops.experts import torch as plain
from deepinfer.ops.experts.weights import Experts, Fp4Experts, fits, tile_experts

most_rows = dispatch.most_rows
combine = choose(plain.combine, invariant.combine)
routed_experts = choose(dispatch.routed_experts, invariant.routed_experts)
shared_expert = choose(dispatch.shared_expert, invariant.shared_expert)
swiglu = choose(plain.swiglu, invariant.swiglu)

__all__ = [
    "Experts",
    "Fp4Experts",
    "combine",
    "fits",
    "most_rows",
    "routed_experts",
    "shared_expert",
    "swiglu",
    "tile_experts",
]
