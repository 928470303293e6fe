"""Compressed KV: tokens, or pairs of them, become entries: a latent that attention reads, and a key that is scored.

Contract. `pool_rows(made FP32 [N, 2, C], pending FP32 [slots, ring, 2, C], pairs, dtype) -> FP32 [W, C]` weighs the two
tokens of each of the step's pairs by a softmax of their scores, channel by channel (which is `pool_pairs`); `made`
holds values and scores of the step's rows, `pending` those of even tokens of earlier steps, token p of a slot at
(p // 2) % ring. `keep_rows(made, pending, kept [Y], slots [N], positions [N])` puts the rows `kept` there.
`latent_rows(x FP32 [W, D], norm, turns, eps, dtype, out, places) -> [W, D]` are latents of `dtype`, normed; rotated
and in the latent format they go to the rows `places` of `out` uint8 [A, row], or all of it if `places` is None.
`key_rows(x [W, d], norm, turns, eps, out, places)` writes keys in the index format likewise.
Rows and pairs are independent; `places` that are equal get equal rows.
"""

from deepinfer.ops.choice import choose
from deepinfer.ops.compressor import dispatch, invariant
from deepinfer.ops.compressor import torch as plain
from deepinfer.ops.compressor.dispatch import keep_rows

pool_pairs = choose(plain.pool_pairs, invariant.pool_pairs)
pool_rows = choose(dispatch.pool_rows, invariant.pool_rows)
latent_rows = choose(dispatch.latent_rows, plain.latent_rows)
key_rows = choose(dispatch.key_rows, plain.key_rows)

__all__ = ["keep_rows", "key_rows", "latent_rows", "pool_pairs", "pool_rows"]
