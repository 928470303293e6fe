"""Moves experts while the engine serves: loads are counted, a better placement is sought now and then, and its experts
are read in the background; all ranks change over a layer between the same two steps.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deepinfer.model.experts import ExpertLoads
from deepinfer.model.weights import ExpertWeights
from deepinfer.ops.experts import Experts
from deepinfer.parallel.collectives import Collectives
from deepinfer.parallel.experts import ExpertTable
from deepinfer.parallel.placement import Placement, balanced_placement, near

GAIN = 0.02
"""A layer's experts move if that lowers the busiest rank's load by this share of the mean."""

ReadExperts = Callable[[int, Sequence[int]], tuple[Experts, Experts]]
"""Reads `w13` and `w2` of some experts of a layer."""


@dataclass(frozen=True)
class _Move:
    """One layer's change. slots: int64, where this rank's new experts go. w13, w2: theirs; None if there are none."""

    layer: int
    placement: Placement
    slots: Tensor
    w13: Experts | None
    w2: Experts | None


class Balancer:
    """One rank's part. The ranks hold the same tables and see the same loads, so they come to the same placements."""

    def __init__(
        self,
        tables: Sequence[ExpertTable],
        weights: Sequence[ExpertWeights],
        loads: ExpertLoads,
        collectives: Collectives,
        read: ReadExperts,
        interval: int,
        nodes: int,
    ) -> None:
        """`interval`: steps from the end of one change to the next count; 0: experts stay where they are.

        `weights` hold this rank's experts; their tensors are written to, between steps. `read` runs in another thread.
        """
        self._tables, self._weights, self._loads = tables, weights, loads
        self._collectives, self._read = collectives, read
        self._interval, self._nodes = interval, nodes
        self._worker = ThreadPoolExecutor(1, "deepinfer-experts")
        self._steps, self._counted = 0, torch.zeros_like(loads.visits, device="cpu")
        self._wanted: list[tuple[int, Placement]] = []
        self._reading: Future[_Move | None] | None = None
        self.moved = 0

    @property
    def ready(self) -> int:
        """1 if this rank has read what its next change needs, or needs nothing; 0 if it still reads."""
        return int(self._reading is None or self._reading.done())

    def between_steps(self, all_ready: int, busy: bool) -> None:
        """Called by all ranks before the same step; `all_ready`: the least of their `ready`. `busy`: a step follows."""
        if self._reading is not None:
            if all_ready:
                move, self._reading = self._reading.result(), None
                if move is not None:
                    self._change(move)
                    self._reading = self._worker.submit(self._fetch_next)
        elif self._interval and busy:
            self._steps += 1
            if self._steps == self._interval:
                self._steps = 0
                counted = self._loads.visits.to("cpu", copy=True)
                visits = self._collectives.total(counted - self._counted)
                self._counted = counted
                self._reading = self._worker.submit(self._plan, visits)

    def _plan(self, visits: Tensor) -> _Move | None:
        """Seek better placements for `visits` [layers, E] of all ranks, and read what the first change needs."""
        for layer, (table, loads) in enumerate(zip(self._tables, visits.double().numpy(), strict=True)):
            present = table.placement
            found = balanced_placement(loads, present.experts.size, present.ranks, self._nodes)
            if present.imbalance(loads) - found.imbalance(loads) > GAIN:
                self._wanted.append((layer, near(found, present, self._nodes)))
        return self._fetch_next()

    def _fetch_next(self) -> _Move | None:
        """Read what the next change needs; None after the last."""
        if not self._wanted:
            return None
        layer, placement = self._wanted.pop(0)
        rank = self._collectives.rank
        wanted, present = placement.experts[rank], self._tables[layer].placement.experts[rank]
        slots = np.flatnonzero(wanted != present)
        w13, w2 = self._read(layer, wanted[slots].tolist()) if len(slots) else (None, None)
        return _Move(layer, placement, torch.from_numpy(slots), w13, w2)

    def _change(self, move: _Move) -> None:
        """Write a layer's new experts over those that leave, and look them up there from now on."""
        held = self._weights[move.layer]
        if move.w13 is not None and move.w2 is not None:
            _put(held.w13, move.w13, move.slots)
            _put(held.w2, move.w2, move.slots)
        self._tables[move.layer].update(move.placement)
        self.moved += 1


def _put(held: Experts, new: Experts, slots: Tensor) -> None:
    """Overwrite some of the stacked matrices; both have the same form."""
    if isinstance(held, Tensor) or isinstance(new, Tensor):
        assert isinstance(held, Tensor)
        assert isinstance(new, Tensor)
        _bytes(held)[slots.to(held.device)] = _bytes(new)
        return
    for name, part in vars(held).items():
        if isinstance(part, Tensor):
            _put(part, getattr(new, name), slots)


def _bytes(stack: Tensor) -> Tensor:
    return stack.view(torch.uint8) if stack.dtype.itemsize == 1 else stack
