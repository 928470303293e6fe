"""Sliding windows: a layer's last keys of every request lie in a ring a slot, and each step extends them.

A step reads the keys before its stretches from the rings, attends over those and its own, and leaves its last ones in
the rings. New keys pass through the stored form too, so a key is the same number in this step and in later ones.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deepinfer.core.batch import Gather, Group, Half, SharedHalf
from deepinfer.ops.cache_rows import load_rows, store_rows
from deepinfer.ops.kv_formats import pack_window, unpack_window


@dataclass(frozen=True)
class WindowPlan:
    """Where the windows of one half's rows lie; the same for all layers of that half.

    old: int64 [K, window - 1], ring addresses of the positions before each of the half's K stretches. exists: bool,
    which of them hold a key of this request. seen: for each group, int64 [G, n], keys in each row's window, its own
    included. kept: int64 [Y], rows that stay in the rings. places: int64 [Y], their ring addresses.
    gather, inside: where ranks share the rows. Then `kept` are rows of the whole step, whose keys `gather` makes, and
    `inside` int64 [K, window - 1] are those at the positions before stretches that belong to this step; -1: none.
    """

    old: Tensor
    exists: Tensor
    seen: tuple[Tensor, ...]
    kept: Tensor
    places: Tensor
    gather: Gather | None = None
    inside: Tensor | None = None


def plan_windows(half: Half, window: int, ring: int) -> WindowPlan:
    """Plan for rings of `ring` rows a slot; address `slot * ring + position % ring`."""
    device = half.positions.device
    before = torch.arange(1 - window, 0, device=device)
    old, exists = [torch.empty(0, window - 1, dtype=torch.int64, device=device)], []
    for group in half.groups:
        positions = group.firsts[:, None] + before
        old.append(group.slots[:, None] * ring + positions.remainder(ring))
        exists.append(positions >= group.floors[:, None])
    seen = (half.positions - half.lowest + 1).clamp(max=window)
    kept, places = ring_rows(half, ring)
    return WindowPlan(
        old=torch.cat(old),
        exists=torch.cat([*exists, torch.empty(0, window - 1, dtype=torch.bool, device=device)]),
        seen=tuple(group.view(seen) for group in half.groups),
        kept=kept,
        places=places,
    )


def plan_shared_windows(half: Half, shared: SharedHalf, window: int, ring: int) -> WindowPlan:
    """The same for this rank's rows of a half that ranks share."""
    plan = plan_windows(half, window, ring)
    heads = torch.cat([_heads(group, half.positions.device) for group in half.groups])
    before = torch.arange(1 - window, 0, device=heads.device)
    positions = half.positions[heads][:, None] + before
    here = positions >= shared.begins[heads][:, None]
    inside = torch.where(here & plan.exists, shared.own[heads][:, None] + before, -1)
    kept, places = ring_rows(shared.whole, ring)
    return replace(plan, exists=plan.exists & ~here, kept=kept, places=places, gather=shared.gather, inside=inside)


def ring_rows(half: Half, ring: int) -> tuple[Tensor, Tensor]:
    """The rows of a half that stay in rings of `ring` rows a slot, and their ring addresses: int64 [Y] each."""
    device = half.positions.device
    kept = [_last_rows(group, ring, device) for group in half.groups]
    rows = torch.cat([*kept, torch.empty(0, dtype=torch.int64, device=device)])
    return rows, half.slots[rows] * ring + half.positions[rows].remainder(ring)


def _last_rows(group: Group, ring: int, device: torch.device) -> Tensor:
    """Rows (of the half) that are among the last `ring` of their stretch."""
    starts = _heads(group, device)
    inside = torch.arange(max(0, group.count - ring), group.count, device=device)
    return (starts[:, None] + inside).flatten()


def _heads(group: Group, device: torch.device) -> Tensor:
    """The first row of each stretch, among the half's."""
    return group.start + torch.arange(len(group.ends), device=device) * group.count


def extend(rings: Tensor, kv: Tensor, half: Half, plan: WindowPlan) -> list[Tensor]:
    """Add a layer's keys to its rings, in place, and give each group's keys.

    rings: uint8 [slots, ring, window bytes]. kv: [M, D], rotated, not yet rounded, of any float dtype. Returns for
    each group [G, window - 1 + n, D] in the dtype of kv; positions without a key are zeros.
    """
    flat = rings.flatten(0, 1)
    packed = pack_window(kv)
    whole = packed if plan.gather is None else plan.gather(packed)
    stretches, before = plan.old.shape
    earlier = load_rows(flat, plan.old, plan.exists)
    if plan.inside is not None:
        earlier = torch.where((plan.inside < 0)[..., None], earlier, whole[plan.inside.clamp(min=0)])
    store_rows(flat, plan.places, whole[plan.kept])
    keys = unpack_window(torch.cat((earlier.flatten(0, 1), packed)), kv.dtype)
    old, new = keys[: stretches * before].view(stretches, before, -1), keys[stretches * before :]
    near, first = [], 0
    for group in half.groups:
        last = first + len(group.ends)
        near.append(torch.cat((old[first:last], group.view(new)), dim=1))
        first = last
    return near
