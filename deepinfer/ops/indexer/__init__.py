"""The indexer: which compressed positions a query attends to.

Shapes are those of a group: G stretches of n consecutive rows each, S compressed positions of each stretch's request.

Contract.
`index_scores(q [G, n, h, d], keys [G, S, d], weights [G, n, h]) -> FP32 [G, n, S]` is `sum_h relu(q_h . k) * w_h`;
product and weighted term are rounded to the dtype of `q`, the sum is FP32. `row_scores` is the same where every row
has keys of its own, [G, n, S, d].
`best_positions(scores FP32 [..., S], count) -> int64 [..., min(count, S)]` are the positions of the largest scores; of
equal scores the lower position wins, whatever else is in the batch. A score of -inf is never chosen: -1 stands in its
place. They come the best first, in batch-invariant mode ascending, each time with -1 behind.
`best_blocks(scores, visible, block, count)` keeps the best blocks of `block` neighbouring positions by their largest
score; the block of a row's newest visible position counts as the best. Blocks come in ascending order, -1 first where
fewer hold a score above -inf. `block_positions` lists the positions of kept blocks, -1 for those of none.
"""

from deepinfer.ops.choice import choose
from deepinfer.ops.indexer import invariant
from deepinfer.ops.indexer import torch as plain
from deepinfer.ops.indexer.torch import best_blocks, block_positions

best_positions = choose(plain.best_positions, invariant.best_positions)
index_scores = choose(plain.index_scores, invariant.index_scores)
row_scores = choose(plain.row_scores, invariant.row_scores)

__all__ = ["best_blocks", "best_positions", "block_positions", "index_scores", "row_scores"]
