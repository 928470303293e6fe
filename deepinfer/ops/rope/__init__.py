"""Rotary position embedding on the last channels of a row.

Contract: `frequencies` gives the angle per position step of each pair of channels, with YaRN's interpolation where the
context is extended; `rotations` turns positions into unit complex numbers, once for all layers that share frequencies;
`rotate` multiplies adjacent channel pairs (2i, 2i + 1) of the last 2 * F channels by them in FP32 and casts back.
Rotating with the conjugates undoes it.
"""

from deepinfer.ops.choice import choose
from deepinfer.ops.rope import invariant
from deepinfer.ops.rope import torch as plain
from deepinfer.ops.rope.frequencies import frequencies

rotate = choose(plain.rotate, invariant.rotate)
rotations = choose(plain.rotations, invariant.rotations)

__all__ = ["frequencies", "rotate", "rotations"]
