"""Random numbers without hidden state: a draw is a function of a seed, a position and a purpose.

The generator is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011): the seed is its
64-bit key, position and purpose make its 128-bit counter.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

Words = TypeVar("Words", npt.NDArray[Any], int)
"""Words of 32 bits, in numbers that hold a product of two of them."""

_ROUNDS = 10
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85
_LOW, _HALF = 0xFFFFFFFF, 32
_FEW = 8
"""Up to so many rows plain numbers are faster than arrays."""


class Purpose(IntEnum):
    """What a draw is for; draws of different purposes at one position are independent.

    SAMPLE: a token from the target's distribution. DRAFT: a token of a block; its place there is the lap, because a
    position may be drafted in several rounds. ACCEPT: whether a draft is. RESIDUAL: the token in place of one that is
    not. SEED: the seed of a completion; its position is the completion's number.
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
    laps = [lap] * len(seeds) if isinstance(lap, int) else lap
    if len(seeds) <= _FEW:
        every = zip(seeds, positions, laps, strict=True)
        return np.array([(_bits(seed, place, purpose, lap) >> 11) * 2.0**-53 for seed, place, lap in every])
    key, place = np.array(seeds, dtype=np.uint64), np.array(positions, dtype=np.uint64)
    counter = place & _LOW, place >> _HALF, np.full_like(place, int(purpose)), np.array(laps, dtype=np.uint64)
    high, low, _, _ = philox(counter, (key & _LOW, key >> _HALF))
    numbers: npt.NDArray[np.float64] = ((high << _HALF | low) >> 11).astype(np.float64) * 2.0**-53
    return numbers


def derived_seed(seed: int, completion: int) -> int:
    """The seed, 0 .. 2^64 - 1, of one of several completions of a prompt; the first one has the request's own."""
    return _bits(seed, completion, Purpose.SEED, 0) if completion else seed


def _bits(seed: int, position: int, purpose: Purpose, lap: int) -> int:
    """A number of 64 bits."""
    counter = position & _LOW, position >> _HALF, int(purpose), lap
    high, low, _, _ = philox(counter, (seed & _LOW, seed >> _HALF))
    return high << _HALF | low


def philox(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> tuple[Words, Words, Words, Words]:
    """Philox4x32-10: four random words of 32 bits for each counter and key."""
    (a, b, c, d), (first, second) = counter, key
    for _ in range(_ROUNDS):
        left, right = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        a, b, c, d = right >> _HALF ^ b ^ first, right & _LOW, left >> _HALF ^ d ^ second, left & _LOW
        first, second = first + _WEYL[0] & _LOW, second + _WEYL[1] & _LOW
    return a, b, c, d
