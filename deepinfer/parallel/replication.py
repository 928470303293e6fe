"""How often each expert exists, so that the load of the busiest copy is least."""

from heapq import heapify, heapreplace

import numpy as np
import numpy.typing as npt

from deepinfer.core.errors import ConfigError

Loads = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


def slot_count(experts: int, extra: int, ranks: int) -> int:
    """Places for experts on all ranks together: `extra` is rounded up to a multiple of `ranks`, and so is the sum.

    Raises ConfigError for more copies than are of use, which is one of each expert on every rank.
    """
    own = -(-experts // ranks)
    each = own + -(-extra // ranks)
    if each > experts:
        raise ConfigError(
            f"{extra} extra experts are too many for {experts} experts on {ranks} ranks; "
            f"DEEPINFER_OVERRIDE_NUM_EXTRA_EXPERTS takes 0 to {(experts - own) * ranks} there"
        )
    return each * ranks


def replicate(loads: Loads, slots: int, most: int) -> Integers:
    """Copies of each expert, [E], `slots` in all and at most `most` each.

    Each further copy goes to the expert whose copies carry most, which is optimal: no other way to spend as many copies
    leaves the busiest one with less.
    """
    counts = np.ones(len(loads), dtype=np.int64)
    busiest = [(-float(load), expert) for expert, load in enumerate(loads)]
    heapify(busiest)
    for _ in range(slots - len(loads)):
        _, expert = busiest[0]
        counts[expert] += 1
        full = counts[expert] == most
        heapreplace(busiest, (np.inf if full else -float(loads[expert]) / float(counts[expert]), expert))
    return counts
