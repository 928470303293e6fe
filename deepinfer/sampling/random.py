"""Random numbers without hidden state: a draw is a function of a seed, a position and a purpose."""

from enum import IntEnum

import numpy as np


class Purpose(IntEnum):
    """What a draw is for; draws of different purposes at one position are independent."""

    SAMPLE = 0


def uniform(seed: int, position: int, purpose: Purpose) -> float:
    """Return a double in [0, 1) from the Philox counter (position, purpose) under the key `seed`.

    seed: 0 .. 2^64 - 1. position: index of the drawn token in its sequence, so that neither the batch nor the schedule
    matters.
    """
    # Words of 64 bits by hand: numpy turns a list that holds a number above 2^63 into doubles.
    counter = np.array([0, position, purpose, 0], dtype=np.uint64)
    bits = np.random.Philox(key=np.array([seed, 0], dtype=np.uint64), counter=counter)
    return float(np.random.Generator(bits).random())
