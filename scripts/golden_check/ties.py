"""Shows whether rows that differ come from a tie in rounding the window KV to FP8.

Two orders of summation give values that differ in the last bits. Where such a value lies on the boundary between two
FP8 codes, the two implementations round to different codes, and from that row on everything moves. That is excused
only when it is shown: rounding one value, which lies within `NEAR` of a boundary, to its other side must reproduce
the expected rows, and must leave alone the rows that agree.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.checkpoint.formats import BLOCK
from deepinfer.reference import attention
from golden_check.compare import Group, errors, failing

NEAR = 1e-5  # distance from a boundary over the root mean square of its block of values
MOST_TIES = 3  # of one run
MOST_TRIED = 64  # values, those nearest to a boundary first, for each tie

Rounding = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Nudge:
    """One value to round the other way: number of the rounding call in a run, place in its tensor [..., row, channel].

    In a run of the target, call and layer number are the same.
    """

    call: int
    row: int
    channel: int
    distance: float

    def __str__(self) -> str:
        return f"window KV {self.call}, row {self.row}, channel {self.channel}, {self.distance:.0e} from its boundary"


def other_side(x: Tensor, rounded: Tensor) -> tuple[Tensor, Tensor]:
    """The neighbouring code's value, and each value's distance from the boundary to it over its block's RMS.

    ``x`` [..., C] before the FP8 round trip and ``rounded`` after it, FP32; returns two FP32 [..., C]. The distance is
    infinite where there is no other side: a value that a code holds exactly, or beyond the largest code.
    """
    blocks, values = x.float().unflatten(-1, (-1, BLOCK)), rounded.float().unflatten(-1, (-1, BLOCK))
    scale = _scale(blocks)
    codes = (values / scale).abs().to(torch.float8_e4m3fn).view(torch.uint8).to(torch.int16)
    outward = blocks.abs() > values.abs()
    neighbours = (codes + torch.where(outward, 1, -1)).clamp(0, 0x7E).to(torch.uint8).view(torch.float8_e4m3fn)
    other = neighbours.float() * scale * torch.where(blocks < 0, -1.0, 1.0)
    distance = (blocks - (values + other) / 2).abs() / blocks.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-30)
    distance = distance.masked_fill((blocks == values) | (other == values), torch.inf)
    return other.flatten(-2), distance.flatten(-2)


def _scale(blocks: Tensor) -> Tensor:
    """The power of two at or above amax / 448 of each block [..., 32], as the round trip chooses it."""
    mantissa, exponent = torch.frexp(blocks.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448)
    return torch.ldexp(torch.ones_like(mantissa), exponent - (mantissa == 0.5).int())


class _Recorder:
    """A rounding that notes the values near a boundary."""

    def __init__(self, rounding: Rounding) -> None:
        self._rounding, self._calls = rounding, 0
        self.near: list[Nudge] = []

    def __call__(self, x: Tensor) -> Tensor:
        rounded = self._rounding(x)
        _, distance = other_side(x, rounded)
        flat = distance.flatten(0, -2)
        for row, channel in torch.nonzero(flat <= NEAR).tolist():
            self.near.append(Nudge(self._calls, row, channel, flat[row, channel].item()))
        self._calls += 1
        return rounded


class _Nudger:
    """A rounding that rounds the given values the other way."""

    def __init__(self, rounding: Rounding, nudges: Sequence[Nudge]) -> None:
        self._rounding, self._nudges, self._calls = rounding, nudges, 0

    def __call__(self, x: Tensor) -> Tensor:
        rounded = self._rounding(x).clone()
        other, _ = other_side(x, rounded)
        for nudge in self._nudges:
            if nudge.call == self._calls:
                place = (nudge.row, nudge.channel)
                rounded.flatten(0, -2)[place] = other.flatten(0, -2)[place]
        self._calls += 1
        return rounded


@contextmanager
def _rounding(replacement: Rounding) -> Iterator[None]:
    """Within the block the model rounds its window KV with `replacement`."""
    original = attention.window_fp8
    attention.window_fp8 = replacement
    try:
        yield
    finally:
        attention.window_fp8 = original


def near_ties(group: Group, nudges: Sequence[Nudge] = ()) -> list[Nudge]:
    """Values of a run (with `nudges` applied) that lie near a boundary, the nearest first."""
    recorder = _Recorder(_Nudger(attention.window_fp8, nudges))
    with _rounding(recorder):
        group.run()
    return sorted(recorder.near, key=lambda nudge: nudge.distance)


def run_nudged(group: Group, nudges: Sequence[Nudge]) -> Mapping[str, Tensor]:
    """The group's run with these values rounded the other way."""
    with _rounding(_Nudger(attention.window_fp8, nudges)):
        return group.run()


def explain(group: Group, failures: set[tuple[str, int]]) -> str:
    """The ties that explain all `failures` of the group, in words with the error that is left; empty if none do.

    Each tie must remove failures and add none; together they must remove all.
    """
    nudges: list[Nudge] = []
    while len(nudges) < MOST_TIES:
        for candidate in near_ties(group, nudges)[:MOST_TRIED]:
            found = errors(group, run_nudged(group, [*nudges, candidate]))
            left = failing(group, found)
            if left < failures:
                nudges, failures = [*nudges, candidate], left
                break
        else:
            return ""
        if not failures:
            worst = max(rows.max().item() for rows in found.values())
            return "; ".join(map(str, nudges)) + f": error {worst:.0e} when rounded the other way"
    return ""
