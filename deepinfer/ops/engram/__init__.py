"""Engram: an n-gram memory that is looked up by hashes of token ids and gated into the residual streams.

Contract.
`EngramHashing.from_config` derives every layer's primes, row offsets and multipliers.
`lookback(classes int64 [G, size - 1 + n], size, pad)` gives the last n tokens' own and `size - 1` earlier compressed
ids, int64 [G, n, size]; a class below 0 (an image token, or no token) stops the lookback: it and all before are `pad`.
`row_ids(back int64 [..., size], ...)` hashes the n-grams of 2 to `size` tokens with every head: table rows int64
[..., (size - 1) * heads], size-major, head-minor; products wrap around in 64 bits.
`remember(x [N, S, H], kv [N, (S + 1) * H], qk FP32 [S, H], is_text bool [N], eps) -> [N, S, H]` adds to each stream
the value (the last H of kv) times a gate from the agreement of stream and its key; image tokens keep their streams.
"""

from deepinfer.ops.choice import choose
from deepinfer.ops.engram import invariant
from deepinfer.ops.engram import torch as plain
from deepinfer.ops.engram.hashing import EngramHashing
from deepinfer.ops.engram.torch import lookback, row_ids

remember = choose(plain.remember, invariant.remember)

__all__ = ["EngramHashing", "lookback", "remember", "row_ids"]
