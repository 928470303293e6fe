"""Products of rows with a weight matrix, which is dense or kept in FP8.

A weight is a tensor [R, C] in the dtype of the activations, or an `Fp8Weight`: E4M3 codes with one FP32 scale a row of
the matrix. With such a weight the activations are rounded as well, to E4M3 with one power-of-two scale a row, and the
product is `sum(codes * codes)` times both scales: no scale is left inside the sum.

Contract.
`linear(x [..., C], weight [R, C]) -> [..., R]` in the dtype of `x`; sums in FP32 where the weight is FP8. `x` may have
been rounded before, as `Fp8Rows`, if several products take it: then the result is BF16.
`grouped_linear(x [N, G, C], weight) -> [N, G, R]`, each group with a matrix of its own: a tensor [G, C, R], ready for
a batched product, or an `Fp8Weight` [G, R, C].
`wide_linear(x [..., C], weight [R, C]) -> FP32 [..., R]`, products and sums in FP32 whatever the two dtypes are.
`quantize_rows(x [..., C]) -> Fp8Rows` is the rounding of activations: the scale is the power of two at or above the
row's largest magnitude / 448.
Rows are independent.
"""

from deepinfer.ops.choice import choose
from deepinfer.ops.linear import dispatch, invariant
from deepinfer.ops.linear.dispatch import quantize_rows
from deepinfer.ops.linear.weights import Fp8Rows, Fp8Weight, Weight, fold_blocks, fold_rows, join

grouped_linear = choose(dispatch.grouped_linear, invariant.grouped_linear)
linear = choose(dispatch.linear, invariant.linear)
wide_linear = choose(dispatch.wide_linear, invariant.wide_linear)

__all__ = [
    "Fp8Rows",
    "Fp8Weight",
    "Weight",
    "fold_blocks",
    "fold_rows",
    "grouped_linear",
    "join",
    "linear",
    "quantize_rows",
    "wide_linear",
]
