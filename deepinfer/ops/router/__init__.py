"""The router of the mixture of experts: which experts a row visits and with which weights.

Contract: `route(h [N, H], weight FP32 or BF16 [E, H], bias FP32 [E] or [N, E], count, scaling)` scores
`sqrt(softplus(weight h))` in FP32, takes the `count` largest of score + bias, and weighs the chosen experts by their
scores, normalised to sum to `scaling`: the bias chooses, it does not weigh. Rows are independent.
"""

from deepinfer.ops.choice import choose
from deepinfer.ops.router import dispatch, invariant

route = choose(dispatch.route, invariant.route)

__all__ = ["route"]
