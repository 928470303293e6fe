"""Constants of the Engram hashes, from the configuration alone."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deepinfer.config.model import ModelConfig

_SEED = 10007  # times the layer id: seed of the layer's multipliers


@dataclass(frozen=True)
class EngramHashing:
    """One layer's constants; a table row is `hash mod prime + offset`.

    primes, offsets: int64 [sizes * heads], size-major, head-minor. multipliers: int64 [longest n-gram], odd, by how far
    back a token is.
    """

    primes: Tensor
    offsets: Tensor
    multipliers: Tensor

    @classmethod
    def from_config(cls, config: ModelConfig) -> tuple["EngramHashing", ...]:
        """The constants of every Engram layer: one ascending run of primes goes layer by layer, size by size."""
        columns = (config.engram_max_ngram_size - 1) * config.engram_n_heads
        primes = _primes_from(config.engram_vocab_size, len(config.engram_layer_ids) * columns)
        made = []
        for index, layer in enumerate(config.engram_layer_ids):
            own = primes[index * columns : (index + 1) * columns]
            offsets = np.cumsum(own) - own
            made.append(cls(*(torch.from_numpy(x.copy()) for x in (own, offsets, _multipliers(config, layer)))))
        return tuple(made)

    def to(self, device: torch.device) -> "EngramHashing":
        """The same on `device`."""
        return EngramHashing(self.primes.to(device), self.offsets.to(device), self.multipliers.to(device))


def _multipliers(config: ModelConfig, layer: int) -> np.ndarray:
    """Odd numbers so small that their product with a class stays below 2^63."""
    bound = max(1, (np.iinfo(np.int64).max // config.engram_compressed_vocab_size) // 2)
    generator = np.random.default_rng(_SEED * layer)
    return generator.integers(0, bound, size=config.engram_max_ngram_size, dtype=np.int64) * 2 + 1


def _primes_from(start: int, count: int) -> np.ndarray:
    """The first `count` primes that are at least `start`, by sieving stretches of numbers."""
    found: list[int] = []
    low = max(start, 2)
    while len(found) < count:
        high = low + 64 + 32 * count
        composite = np.zeros(high - low, dtype=bool)
        for divisor in range(2, math.isqrt(high) + 1):
            composite[max(divisor * divisor, -(-low // divisor) * divisor) - low :: divisor] = True
        found += (low + np.flatnonzero(~composite)).tolist()
        low = high
    return np.array(found[:count], dtype=np.int64)
