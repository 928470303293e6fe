"""Arithmetic for batch-invariant operators: what comes out for a row depends on that row alone, to the bit.

Contract.
`product(a [B, M, K], b [B, K, N] or [K, N]) -> [B, M, N]` in the dtype of `a`: the bits of an element depend on its row
of `a`, its column of `b` and the layout of `b`, not on B, M or N, nor on where in them it lies. In one matrix for all
items (`b` [K, N]) N counts as part of that matrix and may matter.
`row_sums(x FP32 [..., C]) -> [..., 1]` and `ordered_sum(x, dim)` add in an order that follows from C, or from the size
of `dim`, alone.
`elementwise(function, x)` applies a function of single elements that a CPU computes in vectors.

Plain IEEE operations of single elements (one addition, product, quotient or root an operation, conversions,
comparisons, largest and smallest) need no care. What does: a fused `a + b * c` and functions such as `exp`, for which
vectors and the elements left over at the end run different code; sums; and products of matrices.
"""

from deepinfer.ops.invariance.elementwise import elementwise
from deepinfer.ops.invariance.products import product
from deepinfer.ops.invariance.sums import ordered_sum, row_sums

__all__ = ["elementwise", "ordered_sum", "product", "row_sums"]
