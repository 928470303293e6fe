"""How many drafts are verified in a step, and whose: confidence against measured time.

How many is settled when a step is planned, from the confidence in blocks that have been verified by then; whose, when
it runs, from the confidence in the blocks at hand. That keeps the tokens' law: how many depends on the past alone, and
with that fixed, whether a draft is tested never depends on that draft or a later one. To choose how many from the
blocks at hand would not: where time has steps it can pay to verify a draft just because a likely one follows it.

Survival of a draft is the chance that it and all before it in its block are accepted, so it never increases in a block.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deepinfer.core.plan import Verification

Floats = npt.NDArray[np.float64]
Chances = Sequence[float]
"""Survival of each draft of a block."""

LEAST_CHANCE = 1e-6
LEAST_GAIN = 1.05
"""Below it blocks are not worth drafting: what is expected and measured is not that certain."""
_LOOK_AGAIN = 50
_MEMORY, _TRUST_MEMORY, _FORGETTING = 0.9, 0.95, 0.8
_FIRST_TRUST = 4.0
"""So many drafts count as accepted as often as stated before any has been judged."""


class Times(Protocol):
    """What rounds cost, in any unit."""

    def verify(self, rows: Floats) -> Floats:
        """Time of the target over so many rows in all."""

    def draft(self, requests: int) -> float:
        """Time to draft a block for so many requests."""

    def observe(self, rows: int, drafted: int, seconds: float) -> None:
        """Take note of a step over `rows` rows in all that drafted blocks for `drafted` requests."""


@dataclass(frozen=True)
class Best:
    """total: drafts to verify. gain: tokens a time over those of decoding without any drafts."""

    total: int
    gain: float


def best_total(chances: Sequence[Chances], times: Times) -> Best:
    """The number of drafts by which requests with these chances (one block each) get most tokens in a time."""
    requests = len(chances)
    every = np.sort(np.concatenate([np.asarray(block, dtype=np.float64) for block in chances]))[::-1]
    every = every[every >= LEAST_CHANCE]
    tokens = requests + np.concatenate(([0.0], np.cumsum(every)))
    taken = times.verify(requests + np.arange(len(tokens), dtype=np.float64))
    speed = tokens / (times.draft(requests) + taken)
    total = int(speed.argmax())
    return Best(total, float(speed[total] / (requests / taken[0])))


def share(chances: Floats, most: Sequence[int], total: int) -> list[int]:
    """How many of each request's drafts are among the `total` likeliest of all, its first `most` counted.

    chances: FP64 [R, G]. Of equal chances the earlier in its block goes first, then the earlier request: never by what
    the drafts are.
    """
    places = np.arange(chances.shape[1])
    requests, place = np.nonzero(places < np.asarray(most)[:, None])
    # A chance can never be larger than those before it in its block; rounding shall not make it so.
    falling = np.minimum.accumulate(chances, axis=1)[requests, place]
    order = np.lexsort((requests, place, -falling))[: max(0, total)]
    counts: list[int] = np.bincount(requests[order], minlength=len(chances)).tolist()
    return counts


def share_on_device(chances: Tensor, most: Tensor, total: int) -> Tensor:
    """`share` without a look from the host: chances FP64 [R, G], most int64 [R] -> int64 [R].

    total: at most the sum of `most`.
    """
    requests, block = chances.shape
    inside = torch.arange(block, device=chances.device) < most[:, None]
    falling = torch.where(inside, chances.cummin(1).values, -1)
    order = falling.t().flatten().argsort(descending=True, stable=True)[:total]
    taken = torch.zeros(block * requests, dtype=torch.int64, device=chances.device).index_fill_(0, order, 1)
    return taken.view(block, requests).sum(0)


class FixedDrafts:
    """Verifies as many drafts as there may be, always."""

    def __init__(self, depth: int) -> None:
        self._verification = Verification(depth, None, depth > 0, depth > 0)

    def decide(self, chances: Sequence[Chances | None]) -> Verification:
        """The same whatever the chances."""
        return self._verification

    def observe(self, rows: int, drafted: int, seconds: float) -> None:
        """Nothing is learnt."""


class ScheduledDrafts:
    """Verifies as many as pay, and drafts no blocks where none do, though it looks again now and then."""

    def __init__(self, depth: int, times: Times) -> None:
        self._depth, self._times = depth, times
        self._ones: Floats = np.ones(depth)
        self._usual: Floats | None = None  # until a block is known
        self._stated = self._accepted = 0.0
        self._idle = 0
        self._drafted = True  # whether the last step was to draft blocks: else there is nothing to verify

    def decide(self, chances: Sequence[Chances | None]) -> Verification:
        """For the requests that decode; None: nothing is known of one yet, so it counts as the others did."""
        known = [np.asarray(block[: self._depth], dtype=np.float64) for block in chances if block is not None]
        if known:
            mean: Floats = np.mean(known, axis=0)
            self._usual = mean if self._usual is None else _MEMORY * self._usual + (1 - _MEMORY) * mean
        if not chances:
            self._drafted = True
            return Verification(self._depth, 0, True, True)
        usual = self._ones if self._usual is None else self._usual
        blocks = known + [usual] * (len(chances) - len(known))
        best = best_total([(self.trust * block).tolist() for block in blocks], self._times)
        worth = best.total > 0 and best.gain > LEAST_GAIN
        self._idle = 0 if worth else self._idle + 1
        drafting = worth or self._idle % _LOOK_AGAIN == 0
        if drafting and not worth:  # text changes: what was seen long ago shall not decide for ever
            self._stated, self._accepted = _FORGETTING * self._stated, _FORGETTING * self._accepted
        total = best.total if self._drafted else 0
        self._drafted = drafting
        return Verification(self._depth, total, drafting, True)

    @property
    def trust(self) -> float:
        """By what stated chances are multiplied, 0 .. 1: how many of the drafts verified of late were accepted, over
        how many should have been.
        """
        return min(1.0, (self._accepted + _FIRST_TRUST) / (self._stated + _FIRST_TRUST))

    def judged(self, rounds: Sequence[tuple[Chances, int]]) -> None:
        """Learn from the rounds of a step: of each, the survival of the drafts verified, and how many were accepted."""
        stated, accepted = sum(sum(chances) for chances, _ in rounds), sum(count for _, count in rounds)
        if stated or accepted:
            self._stated = _TRUST_MEMORY * self._stated + stated
            self._accepted = _TRUST_MEMORY * self._accepted + accepted

    def observe(self, rows: int, drafted: int, seconds: float) -> None:
        """Correct the times by a step over `rows` rows in all that drafted blocks for `drafted` requests."""
        self._times.observe(rows, drafted, seconds)
