"""Routed experts that lie on many ranks: a row goes to the ranks of the experts it chose, and their results come back.

The results of a row are summed at home in the order of its choice, as one process does, so where an expert lies changes
nothing: with operators whose rows are independent the sum is the same to the bit.
"""

from dataclasses import dataclass

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
        parcel = _pack(h, ranks, slots, routing, self._collectives.size, not isinstance(weights.w13, Tensor))
        counts = torch.stack((parcel.rows, parcel.visits), 1)
        coming = self._collectives.swap(counts)
        (rows, visits), (rows_coming, visits_coming) = counts.T.tolist(), coming.T.tolist()
        arrived = self._collectives.send_rows(parcel.data, rows, rows_coming)

        def finish(base: Tensor | None = None) -> Tensor:
            results = _answer(arrived(), h, chosen.shape[1], weights, limit)
            back = self._collectives.send_rows(results, visits_coming, visits)()
            ordered = torch.empty_like(back)
            ordered[ranks.flatten().argsort(stable=True)] = back
            routed = combine(ordered.view(*chosen.shape, h.shape[1]))
            return routed if base is None else routed + base

        return finish


@dataclass(frozen=True)
class _Parcel:
    """What goes out. data: uint8 [P, bytes], in the order of the ranks. rows, visits: int64 [ranks], for each."""

    data: Tensor
    rows: Tensor
    visits: Tensor


def _pack(h: Tensor, ranks: Tensor, slots: Tensor, routing: Tensor, size: int, fp8: bool) -> _Parcel:
    """A row goes once to each rank that it visits, with the slots there (-1: a choice elsewhere) and their weights.

    fp8: experts round their input to E4M3 with a power of two as the row's scale in any case, so rows travel like that.
    """
    visited = ranks == torch.arange(size, device=h.device)[:, None, None]  # [ranks, M, K]
    ranks_to, rows = visited.any(-1).nonzero(as_tuple=True)
    there = visited[ranks_to, rows]
    parts = [torch.where(there, slots[rows], -1).int(), routing[rows]]
    if fp8:
        codes, scales = quantize_rows(h)
        parts = [codes[rows], scales[rows, None], *parts]
    else:
        parts = [h[rows], *parts]
    data = torch.cat([part.contiguous().view(torch.uint8) for part in parts], 1)
    return _Parcel(data, ranks_to.bincount(minlength=size), ranks.flatten().bincount(minlength=size))


def _answer(data: Tensor, like: Tensor, count: int, weights: ExpertWeights, limit: float) -> Tensor:
    """The results [V, H] of all visits in parcels that came, row by row and choice by choice."""
    hidden, numbers = like.shape[1], 4 * count
    x = data[:, : -2 * numbers]
    slots = data[:, -2 * numbers : -numbers].contiguous().view(torch.int32)
    routing = data[:, -numbers:].contiguous().view(torch.float32)
    if isinstance(weights.w13, Tensor):
        rows = x.contiguous().view(like.dtype)
    else:
        codes, scales = x[:, :hidden].contiguous().view(torch.float8_e4m3fn), x[:, hidden:].contiguous()
        rows = (codes.float() * scales.view(torch.float32)).to(like.dtype)
    row, choice = (slots >= 0).nonzero(as_tuple=True)
    visits, shares = slots[row, choice, None].long(), routing[row, choice, None]
    return routed_experts(rows[row], visits, shares, weights.w13, weights.w2, limit)
