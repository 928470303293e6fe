"""Attention row by row, over stored bytes by address: the operators of the kernels' path through a layer.

Nothing is unpacked to memory, and no shape depends on a length: a row names the places it sees. M rows, h heads of D
channels, F rotated pairs; places are int32, -1 for none.

Contract.
`window_rows(x [M, D], norm FP32 [D], turns complex64 [M, F], eps, places, packed, ring)` norms, rotates and stores keys
in the window format: all into `packed` uint8 [M, row], row i also into `ring` uint8 [A, row] at `places[i]` (int64).
`attend(q [M, h, D], turns, windows uint8 [A, row], near [M, W], latents uint8 [B, row] or None, chosen [M, K] or None,
sink FP32 [h]) -> [M, h, D]` rotates the queries and attends; places lie in `windows` and `latents`.
`output(o [M, h, D], turns, wo_a, wo_b) -> [M, H]` rotates back and projects.
`index_scores(q [M, h, d], turns, weights [M, h], factor, index) -> FP32 [M, length]` rotates and rounds index queries
and scores them against the entries that an `Index` names; what is not visible is undefined, or -inf with `blocks`.
`best_entries(scores FP32 [M, length], index, count) -> int32 [M, count]`: the addresses of the entries that a row sees
with the largest scores, in any order, but in the same each time, -1 where there are fewer; of equal scores the lower
column is kept.
`entry_rows(entries int32 [M, K], index) -> int32 [M, K]`: the addresses of entries, -1 for none.

`torch` defines them, for any shapes; `nvidia` has them as kernels for the released model's.
"""

from deepinfer.ops.rows.index import Index

__all__ = ["Index"]
