"""Sliding windows: a layer's last keys of every request lie in a ring a slot, and each step extends them.

A step reads the keys before its stretches from the rings, attends over those and its own, and leaves its last ones in
the rings. New keys pass through the stored form too, so a key is the same number in this step and in later ones.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.core.batch import Group, Half
from deepinfer.ops.cache_rows import load_rows, store_rows
from deepinfer.ops.kv_formats import pack_window, unpack_window


@dataclass(frozen=True)
class WindowPlan:
    """Where the windows of one half's rows lie; the same for all layers of that half.

    old: int64 [K, window - 1], ring addresses of the positions before each of the half's K stretches. exists: bool,
    which of them hold a key of this request. seen: for each group, int64 [G, n], keys in each row's window, its own
    included. kept: int64 [Y], rows that stay in the rings. places: int64 [Y], their ring addresses.
    """

    old: Tensor
    exists: Tensor
    seen: tuple[Tensor, ...]
    kept: Tensor
    places: Tensor


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


def ring_rows(half: Half, ring: int) -> tuple[Tensor, Tensor]:
    """The rows of a half that stay in rings of `ring` rows a slot, and their ring addresses: int64 [Y] each."""
    device = half.positions.device
    kept = [_last_rows(group, ring, device) for group in half.groups]
    rows = torch.cat([*kept, torch.empty(0, dtype=torch.int64, device=device)])
    return rows, half.slots[rows] * ring + half.positions[rows].remainder(ring)


def _last_rows(group: Group, ring: int, device: torch.device) -> Tensor:
    """Rows (of the half) that are among the last `ring` of their stretch."""
    starts = group.start + torch.arange(len(group.ends), device=device) * group.count
    inside = torch.arange(max(0, group.count - ring), group.count, device=device)
    return (starts[:, None] + inside).flatten()


def extend(rings: Tensor, kv: Tensor, half: Half, plan: WindowPlan) -> list[Tensor]:
    """Add a layer's keys to its rings, in place, and give each group's keys.

    rings: uint8 [slots, ring, window bytes]. kv: [M, D], rotated, not yet rounded, of any float dtype. Returns for
    each group [G, window - 1 + n, D] in the dtype of kv; positions without a key are zeros.
    """
    flat = rings.flatten(0, 1)
    packed = pack_window(kv)
    stretches, before = plan.old.shape
    stored = torch.cat((load_rows(flat, plan.old, plan.exists).flatten(0, 1), packed))
    store_rows(flat, plan.places, packed[plan.kept])
    keys = unpack_window(stored, kv.dtype)
    old, new = keys[: stretches * before].view(stretches, before, -1), keys[stretches * before :]
    near, first = [], 0
    for group in half.groups:
        last = first + len(group.ends)
        near.append(torch.cat((old[first:last], group.view(new)), dim=1))
        first = last
    return near
