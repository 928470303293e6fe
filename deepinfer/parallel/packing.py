"""Copies of experts into ranks with as many places each, so that the busiest rank has least to do."""

import numpy as np

from deepinfer.parallel.replication import Integers, Loads

_MOST_SWAPS = 2000
_ENOUGH = 1e-9  # of the mean load: what a swap must win


def pack(loads: Loads, experts: Integers, ranks: int) -> Integers:
    """Place copies with `loads` [P] of the `experts` [P]: places [ranks, P / ranks], each an index into the copies.

    No rank gets two copies of one expert, which is possible as long as none has more copies than there are ranks.
    The largest copy goes first, to the rank with least load; then pairs are swapped while that helps the busiest rank.
    """
    return _refine(loads, experts, _largest_first(loads, experts, ranks))


def _largest_first(loads: Loads, experts: Integers, ranks: int) -> Integers:
    size = len(loads) // ranks
    places = np.full((ranks, size), -1, dtype=np.int64)
    filled, sums = np.zeros(ranks, dtype=np.int64), np.zeros(ranks)
    holders: dict[int, set[int]] = {int(expert): set() for expert in experts}
    # Of equal loads the copies of one expert stay together, so that they meet as many free ranks as can be.
    for copy in np.lexsort((experts, -loads)):
        expert = int(experts[copy])
        open_ranks = [rank for rank in np.flatnonzero(filled < size).tolist() if rank not in holders[expert]]
        if open_ranks:
            rank = min(open_ranks, key=lambda place: (sums[place], place))
        else:
            rank = _make_room(places, filled, experts, holders, expert)
            sums = np.where(places >= 0, loads[places], 0).sum(1)
        places[rank, filled[rank]] = copy
        filled[rank] += 1
        sums[rank] += loads[copy]
        holders[expert].add(int(rank))
    return places


def _make_room(places: Integers, filled: Integers, experts: Integers, holders: dict[int, set[int]], expert: int) -> int:
    """Free a place on a full rank without the expert, by moving something of it to a rank with room, all of which have
    the expert; returns the rank. Such a copy exists: the rank with room holds fewer other experts than the full one.
    """
    roomy = int(np.flatnonzero(filled < places.shape[1])[0])
    there = set(experts[places[roomy, : filled[roomy]]].tolist())
    for rank in range(len(places)):
        if rank in holders[expert]:
            continue
        for place, copy in enumerate(places[rank]):
            moved = int(experts[copy])
            if moved not in there:
                places[roomy, filled[roomy]] = copy
                filled[roomy] += 1
                filled[rank] -= 1
                places[rank, place:-1] = places[rank, place + 1 :]
                places[rank, -1] = -1
                holders[moved] ^= {rank, roomy}
                return rank
    raise ValueError(f"expert {expert} has more copies than there are ranks")


def _refine(loads: Loads, experts: Integers, places: Integers) -> Integers:
    """Swap copies of the busiest rank for lighter ones elsewhere while its load shrinks below what it was."""
    if len(places) == 1:
        return places
    sums = loads[places].sum(1)
    least = _ENOUGH * max(float(sums.mean()), np.finfo(float).tiny)
    for _ in range(_MOST_SWAPS):
        busiest = int(sums.argmax())
        move = _best_swap(loads, experts, places, sums, busiest)
        if move is None or move[0] <= least:
            return places
        _, place, other, their_place = move
        change = loads[places[busiest, place]] - loads[places[other, their_place]]
        places[busiest, place], places[other, their_place] = places[other, their_place], places[busiest, place]
        sums[busiest] -= change
        sums[other] += change
    return places


def _best_swap(
    loads: Loads, experts: Integers, places: Integers, sums: Loads, busiest: int
) -> tuple[float, int, int, int] | None:
    """(what the busiest rank wins, its place, other rank, its place) of the best swap; None if none is allowed."""
    own, theirs = places[busiest], places
    change = loads[own][:, None, None] - loads[theirs][None]  # [own, rank, place]
    after = np.maximum(sums[busiest] - change, sums[None, :, None] + change)
    held = np.zeros((len(places), int(experts.max()) + 1), dtype=bool)
    held[np.repeat(np.arange(len(places)), places.shape[1]), experts[places].ravel()] = True
    clash = held[:, experts[own]].T[:, :, None] | held[busiest][experts[theirs]][None]
    after[clash] = np.inf
    after[:, busiest] = np.inf
    best = int(after.argmin())
    if not np.isfinite(after.flat[best]):
        return None
    place, other, their_place = (int(part) for part in np.unravel_index(best, after.shape))
    return float(sums[busiest] - after.flat[best]), place, other, their_place
