"""Root-mean-square normalisation of rows.

Contract: `rms_norm(x [..., C], weight FP32 [C], eps) -> [..., C]` in the dtype of `x`, computed in FP32 as
`x * rsqrt(mean(x^2) + eps) * weight` and cast once at the end. A row of zeros gives zeros: FP32 holds the model's eps.
Rows are independent. `rounded_rms_norm` rounds what that gives to E4M3 with a scale a row, as FP8 products take it.
"""

from deepinfer.ops.choice import choose
from deepinfer.ops.norm import dispatch, invariant

rms_norm = choose(dispatch.rms_norm, invariant.rms_norm)
rounded_rms_norm = choose(dispatch.rounded_rms_norm, invariant.rounded_rms_norm)

__all__ = ["rms_norm", "rounded_rms_norm"]
