"""Attention of each row over its own window and over a few far positions, with a sink: CSA2's core.

Shapes are those of a group: G stretches of n consecutive rows each. All heads share one K = V vector a position.

Contract: `sparse_attention(q [G, n, h, D], near [G, P + n, D], seen int64 [G, n], far [G, F, D] or None, chosen int64
[G, n, K] or None, sink FP32 [h]) -> [G, n, h, D]` in the dtype of `q`. `near` holds the P positions before a stretch
and those of its rows; row i sees the last `seen[i]` of them up to its own, P + i. `chosen` are places in `far`, -1 for
none (behind the others, in batch-invariant mode). Scores are scaled by D ** -0.5; the softmax is FP32 with `sink` as
one more logit that adds to the denominator only. Stretches do not touch each other; within one, masked values take part
with weight 0, so they must be finite.
"""

from deepinfer.ops.choice import choose
from deepinfer.ops.sparse_attention import invariant
from deepinfer.ops.sparse_attention import torch as plain

sparse_attention = choose(plain.sparse_attention, invariant.sparse_attention)

__all__ = ["sparse_attention"]
