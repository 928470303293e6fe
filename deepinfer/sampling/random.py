"""Random numbers without hidden state: a draw is a function of a seed, a position and a purpose.

The generator is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011): the seed is its
64-bit key, position and purpose make its 128-bit counter.
"""

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]
"""Words of 32 bits, each in a number of 64: so a product of two of them is exact."""

_ROUNDS = 10
_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)


class Purpose(IntEnum):
    """What a draw is for; draws of different purposes at one position are independent.

    SAMPLE: a token from the target's distribution. DRAFT: a token of a block; its place there is the lap, because a
    position may be drafted in several rounds. ACCEPT: whether a draft is. RESIDUAL: the token in place of one that is
    not.
    """

    SAMPLE = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3
    SEED = 4


def uniform(
    seeds: Sequence[int], positions: Sequence[int], purpose: Purpose, lap: int | Sequence[int] = 0
) -> npt.NDArray[np.float64]:
    """Return float64 [R] in [0, 1), multiples of 2^-53, each a function of its seed, its position, the purpose and lap.

    seeds: 0 .. 2^64 - 1. positions: 0 .. 2^64 - 1, indices of the drawn tokens in their sequences, so that neither the
    batch nor the schedule matters. lap: 0 .. 2^32 - 1, tells draws apart where a position has several for one purpose;
    one for all rows, or one for each.
    """
    key, place = np.array(seeds, dtype=np.uint64), np.array(positions, dtype=np.uint64)
    laps = np.broadcast_to(np.asarray(lap, dtype=np.uint64), place.shape)
    counter = place & _LOW, place >> _HALF, np.full_like(place, int(purpose)), laps
    high, low, _, _ = philox(counter, (key & _LOW, key >> _HALF))
    return ((high << _HALF | low) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def philox(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> tuple[Words, Words, Words, Words]:
    """Philox4x32-10: four random words of 32 bits for each counter and key."""
    (a, b, c, d), (first, second) = counter, key
    for _ in range(_ROUNDS):
        left, right = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        a, b, c, d = right >> _HALF ^ b ^ first, right & _LOW, left >> _HALF ^ d ^ second, left & _LOW
        first, second = first + _WEYL[0] & _LOW, second + _WEYL[1] & _LOW
    return a, b, c, d


def derived_seed(seed: int, completion: int) -> int:
    """The seed, 0 .. 2^64 - 1, of one of several completions of a prompt; the first one has the request's own."""
    if not completion:
        return seed
    counter = np.array([[completion], [0], [int(Purpose.SEED)], [0]], dtype=np.uint64)
    key = np.array([[seed & 0xFFFFFFFF], [seed >> 32]], dtype=np.uint64)
    high, low, _, _ = philox((counter[0], counter[1], counter[2], counter[3]), (key[0], key[1]))
    return int(high[0]) << 32 | int(low[0])
