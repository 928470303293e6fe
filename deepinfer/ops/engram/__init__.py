"""Engram: an n-gram memory that is looked up by hashes of token ids and gated into the residual streams.

Contract.
`EngramHashing.from_config` derives every layer's primes, row offsets and multipliers.
`lookback(classes int64 [G, size - 1 + n], size, pad)` gives the last n tokens' own and `size - 1` earlier compressed
ids, int64 [G, n, size]; a class below 0 (an image token, or no token) stops the lookback: it and all before are `pad`.
`recall(ids int64 [N], slots, positions, history int64 [slots, ring], classes int64 [V], size, pad)` does that for
single tokens behind those in `history` (position p at p % ring), adds them to it, and tells which are text: int64
[N, size], bool [N]. Equal rows are allowed.
`row_ids(back int64 [N, size], ...)` hashes the n-grams of 2 to `size` tokens with every head: table rows int64
[N, (size - 1) * heads], size-major, head-minor; products wrap around in 64 bits.
`table_rows(codes uint8 [T, C], scales uint8 [T, C / 32], ids int64 [A], dtype) -> [A, C]` are rows of a stored table.
`remember(x [N, S, H], kv [N, (S + 1) * H], qk FP32 [S, H], is_text bool [N], eps) -> [N, S, H]` adds to each stream
the value (the last H of kv) times a gate from the agreement of stream and its key; image tokens keep their streams.
"""

from deepinfer.ops.choice import choose
from deepinfer.ops.engram import dispatch, invariant
from deepinfer.ops.engram.dispatch import recall, row_ids, table_rows
from deepinfer.ops.engram.hashing import EngramHashing
from deepinfer.ops.engram.torch import lookback

remember = choose(dispatch.remember, invariant.remember)

__all__ = ["EngramHashing", "lookback", "recall", "remember", "row_ids", "table_rows"]
