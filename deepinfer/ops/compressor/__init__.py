"""Pooling of the compressed KV: two tokens become one latent in layers of ratio 2.

Contract: `pool_pairs(values FP32 [W, 2, C], scores FP32 [W, 2, C]) -> FP32 [W, C]` weighs the two tokens of each pair
by a softmax of their scores, channel by channel. Pairs are independent.
"""

from deepinfer.ops.choice import choose
from deepinfer.ops.compressor import invariant
from deepinfer.ops.compressor import torch as plain

pool_pairs = choose(plain.pool_pairs, invariant.pool_pairs)

__all__ = ["pool_pairs"]
