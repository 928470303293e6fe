"""Routed experts that lie on many ranks: a row goes to the ranks of the experts it chose, and their results come back.

The results of a row are summed at home in the order of its choice, as one process does, so where an expert lies changes
nothing: with operators whose rows are independent the sum is the same to the bit.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from deepinfer.model.experts import Finish
from deepinfer.model.weights import ExpertWeights
from deepinfer.ops.experts import combine, routed_experts
from deepinfer.ops.linear import quantize_rows
from deepinfer.parallel.collectives import Collectives
from deepinfer.parallel.placement import Placement


class ExpertTable:
    """Which places hold each expert of a layer, on the device; place p is slot p % slots of rank p // slots."""

    def __init__(self, placement: Placement, experts: int, device: torch.device) -> None:
        self.slots = placement.experts.shape[1]
        self.places = torch.zeros(experts, placement.ranks, dtype=torch.int64, device=device)
        self.ranks = torch.arange(placement.ranks, device=device)
        self.copies = torch.zeros(experts, dtype=torch.int64, device=device)
        self.placement = placement
        self.update(placement)

    def update(self, placement: Placement) -> None:
        """Look up in another placement from now on; of as many ranks and slots."""
        order = np.argsort(placement.experts.ravel(), kind="stable")
        copies = placement.copies(len(self.copies))
        starts = np.cumsum(copies) - copies
        columns = np.minimum(np.arange(placement.ranks), copies[:, None] - 1)
        self.places.copy_(torch.from_numpy(order[starts[:, None] + columns]))
        self.copies.copy_(torch.from_numpy(copies))
        self.placement = placement

    def find(self, chosen: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """Ranks and slots, int64 [M, K], of the experts `chosen` [M, K]; rows take the copies of an expert in turn.

        `first`: where the turn begins, so that ranks do not all begin with the same copy.
        """
        turn = torch.arange(first, first + len(chosen), device=chosen.device)[:, None]
        place = self.places[chosen, turn % self.copies[chosen]]
        return place // self.slots, place % self.slots


class SharedExperts:
    """The routed experts of one layer, a part of them here; a `RoutedExperts` that all ranks call together."""

    def __init__(self, table: ExpertTable, collectives: Collectives) -> None:
        self.table, self._collectives = table, collectives

    def __call__(self, h: Tensor, chosen: Tensor, routing: Tensor, weights: ExpertWeights, limit: float) -> Finish:
        """h [M, H], M = 0 on a rank that only helps; `weights` hold the experts in this rank's slots."""
        ranks, slots = self.table.find(chosen, self._collectives.rank)
        visited = ranks == self.table.ranks[:, None, None]  # [ranks, M, K]
        goes = visited.any(-1)
        counts = torch.stack((goes.sum(1), visited.sum((1, 2))), 1)
        both = torch.cat((counts, self._collectives.swap(counts)), 1)
        rows, visits, rows_coming, visits_coming = both.T.tolist()  # the one time that the host waits for the device
        parcels = _pack(h, _true_places(goes, sum(rows)), visited, slots, routing, not isinstance(weights.w13, Tensor))
        arrived = self._collectives.send_rows(parcels, rows, rows_coming)

        def finish(base: Callable[[], Tensor] | None = None) -> Tensor:
            added = None if base is None else base()  # while rows travel
            results = _answer(arrived(), sum(visits_coming), h, chosen.shape[1], weights, limit)
            back = self._collectives.send_rows(results, visits_coming, visits)()
            ordered = torch.empty_like(back).index_copy_(0, ranks.flatten().argsort(stable=True), back)
            routed = combine(ordered.view(*chosen.shape, h.shape[1]))
            return routed if added is None else routed + added

        return finish


def _true_places(mask: Tensor, count: int) -> Tensor:
    """Where the `count` true elements of a mask lie, in order, int64 [count]; nobody waits for the device."""
    return mask.flatten().byte().argsort(descending=True, stable=True)[:count]


def _pack(h: Tensor, places: Tensor, visited: Tensor, slots: Tensor, routing: Tensor, fp8: bool) -> Tensor:
    """Parcels uint8 [P, bytes] for the pairs of a rank and a row at `places` of [ranks, M], in the order of the ranks.

    A row goes once to each rank that it visits, with the slots there (-1: a choice elsewhere) and their weights.
    fp8: experts round their input to E4M3 with a power of two as the row's scale in any case, so rows travel like that.
    """
    rows = places % max(1, len(h))
    there = visited.flatten(0, 1)[places]
    parts = [torch.where(there, slots[rows], -1).int(), routing[rows]]
    if fp8:
        codes, scales = quantize_rows(h)
        parts = [codes[rows], scales[rows, None], *parts]
    else:
        parts = [h[rows], *parts]
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], 1)


def _answer(data: Tensor, total: int, like: Tensor, count: int, weights: ExpertWeights, limit: float) -> Tensor:
    """The results [V, H] of all `total` visits in parcels that came, row by row and choice by choice."""
    hidden, numbers = like.shape[1], 4 * count
    x = data[:, : -2 * numbers]
    slots = data[:, -2 * numbers : -numbers].contiguous().view(torch.int32)
    routing = data[:, -numbers:].contiguous().view(torch.float32)
    if isinstance(weights.w13, Tensor):
        rows = x.contiguous().view(like.dtype)
    else:
        codes, scales = x[:, :hidden].contiguous().view(torch.float8_e4m3fn), x[:, hidden:].contiguous()
        rows = (codes.float() * scales.view(torch.float32)).to(like.dtype)
    places = _true_places(slots >= 0, total)
    visits, shares = slots.flatten()[places, None].long(), routing.flatten()[places, None]
    return routed_experts(rows[places // count], visits, shares, weights.w13, weights.w2, limit)
