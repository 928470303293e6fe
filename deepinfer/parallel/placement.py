"""Where the experts of one layer lie: balanced by their loads, within nodes where there are several, and near to where
they lay before.
"""

from dataclasses import dataclass

import numpy as np

from deepinfer.parallel.packing import pack
from deepinfer.parallel.replication import Integers, Loads, replicate, slot_count


@dataclass(frozen=True, eq=False)
class Placement:
    """experts: int64 [ranks, slots], the expert in each place of each rank; no rank has an expert twice."""

    experts: Integers

    @property
    def ranks(self) -> int:
        """How many ranks share the experts."""
        return len(self.experts)

    def copies(self, count: int) -> Integers:
        """How many places each of `count` experts has, [E]."""
        return np.bincount(self.experts.ravel(), minlength=count)

    def rank_loads(self, loads: Loads) -> Loads:
        """What each rank has to do, [ranks], when the copies of an expert share its load evenly."""
        shares: Loads = (loads / self.copies(len(loads)))[self.experts].sum(1)
        return shares

    def imbalance(self, loads: Loads) -> float:
        """Load of the busiest rank over the mean of all; 1 is perfect, and what an idle layer has."""
        each = self.rank_loads(loads)
        return float(each.max() / each.mean()) if each.any() else 1.0


def first_placement(experts: int, extra: int, ranks: int) -> Placement:
    """Before anything is known of loads: experts in their order, then as many again as there is place for."""
    slots = slot_count(experts, extra, ranks)
    counts = np.full(experts, slots // experts, dtype=np.int64)
    counts[: slots % experts] += 1
    if slots == experts:
        return Placement(np.arange(experts, dtype=np.int64).reshape(ranks, -1))
    copies = np.repeat(np.arange(experts, dtype=np.int64), counts)
    return Placement(np.sort(copies[pack(np.ones(slots), copies, ranks)], axis=1))


def balanced_placement(loads: Loads, slots: int, ranks: int, nodes: int = 1) -> Placement:
    """Place experts with `loads` [E] (any unit) in `slots` places on `ranks` ranks, which `nodes` nodes share evenly.

    With several nodes the experts are first dealt to nodes, equally many and with even loads, and copies are made
    within a node only: new copies then come over the links of the node. Where experts, places or ranks cannot be
    divided so, or a node would be full, all ranks count as one node.
    """
    experts = len(loads)
    divides = experts % nodes == slots % nodes == ranks % nodes == 0
    if nodes == 1 or not divides or slots // nodes > experts // nodes * (ranks // nodes):
        return Placement(_spread(loads, np.arange(experts, dtype=np.int64), slots, ranks))
    homes = pack(loads, np.arange(experts, dtype=np.int64), nodes)
    parts = [_spread(loads[home], home, slots // nodes, ranks // nodes) for home in homes]
    return Placement(np.concatenate(parts))


def _spread(loads: Loads, names: Integers, slots: int, ranks: int) -> Integers:
    """Replicate and pack the experts `names` [E] with `loads` [E]: names in places [ranks, slots / ranks]."""
    counts = replicate(loads, slots, ranks)
    copies = np.repeat(np.arange(len(names)), counts)
    places = pack((loads / counts)[copies], copies, ranks)
    placed: Integers = names[copies[places]]
    return placed


def near(wanted: Placement, present: Placement, nodes: int = 1) -> Placement:
    """The same placement with ranks of a node renamed and places in another order, so that little has to move."""
    size = wanted.ranks // nodes if wanted.ranks % nodes == 0 else wanted.ranks
    result = np.empty_like(wanted.experts)
    for begin in range(0, wanted.ranks, size):
        part = slice(begin, begin + size)
        for old, new in _partners(wanted.experts[part], present.experts[part]):
            result[begin + old] = _in_place(wanted.experts[begin + new], present.experts[begin + old])
    return Placement(result)


def _partners(wanted: Integers, present: Integers) -> list[tuple[int, int]]:
    """(present rank, wanted rank) pairs, those with most in common first."""
    count = int(max(wanted.max(), present.max())) + 1
    has = np.zeros((2, len(wanted), count), dtype=np.int64)
    for side, experts in enumerate((present, wanted)):
        has[side, np.repeat(np.arange(len(experts)), experts.shape[1]), experts.ravel()] = 1
    common = has[0] @ has[1].T
    pairs: list[tuple[int, int]] = []
    free_old, free_new = set(range(len(wanted))), set(range(len(wanted)))
    for place in np.argsort(-common, axis=None, kind="stable"):
        old, new = divmod(int(place), len(wanted))
        if old in free_old and new in free_new:
            pairs.append((old, new))
            free_old.remove(old)
            free_new.remove(new)
    return pairs


def _in_place(wanted: Integers, present: Integers) -> Integers:
    """The wanted experts of a rank, those that it has already where they are."""
    stays = np.isin(present, wanted)
    result = present.copy()
    result[~stays] = wanted[~np.isin(wanted, present)]
    return result
