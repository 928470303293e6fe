"""Measures what rounds cost: the target over some rows, and blocks for some requests."""

import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Protocol

import torch
from torch import Tensor

from deepinfer.cache.storage import Caches
from deepinfer.core.batch import Batch
from deepinfer.core.plan import Span
from deepinfer.engine.recorded import RecordedSteps
from deepinfer.model.batching import arrange
from deepinfer.model.drafter import Anchors, Drafter
from deepinfer.model.model import InferenceModel
from deepinfer.speculative.drafting import draft
from deepinfer.speculative.recorded import RecordedDrafts
from deepinfer.speculative.times import Measured

_CONTEXT = 512
_TIMES = 3


def platform_name(device: torch.device, dtype: torch.dtype) -> str:
    """What times depend on beside the model: processor, threads, type of the activations."""
    kind = str(dtype).removeprefix("torch.")
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, {kind}"
    return f"{_processor()}, {torch.get_num_threads()} threads, {kind}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


class Rounds(Protocol):
    """Runs the parts of rounds over caches that no request uses, with tokens of text."""

    def verify(self, spans: Sequence[Span]) -> object:
        """Run the rows of `spans`."""

    def draft(self, requests: int, position: int) -> object:
        """Draft a block behind that position for so many requests."""


@torch.inference_mode()
def measure(rounds: Rounds, caches: Caches, window: int) -> Measured:
    """Time `rounds` of all sizes over `caches` that no request uses; `window`: the model's.

    What is written lies where nothing is kept; page tables are left as new.
    """
    slots, depth = caches.slots, caches.ring - window
    sizes, device = _tiers(slots), caches.page_table.device
    caches.page_table.copy_(torch.arange(caches.page_table.numel()).view_as(caches.page_table) % caches.pages)
    first = min(_CONTEXT, caches.page_table.shape[1] * caches.page_size - depth)
    steps = [(size, 1) for size in sizes] + [(slots, count) for count in range(2, depth + 1)]
    verify = [_time(device, partial(rounds.verify, _spans(*step, first))) for step in steps]
    drafting = [_time(device, partial(rounds.draft, size, first)) for size in sizes]
    caches.page_table.zero_()
    rows = tuple(requests * count for requests, count in steps)
    return Measured(rows, tuple(verify), tuple(sizes), tuple(drafting))


def _spans(requests: int, count: int, first: int) -> list[Span]:
    return [Span(slot, slot, first, count, None, 0, 0, 0, 0, True) for slot in range(requests)]


def _tiers(most: int) -> list[int]:
    """1, 2, 4, ... and `most`."""
    sizes: list[int] = []
    while not sizes or 2 * sizes[-1] < most:
        sizes.append(2 * sizes[-1] if sizes else 1)
    return sizes if sizes[-1] == most else [*sizes, most]


def _time(device: torch.device, action: Callable[[], object]) -> float:
    taken = []
    for _ in range(1 + _TIMES):
        begin = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - begin)
    return median(taken[1:])


@dataclass(frozen=True)
class LaunchedRounds:
    """Rounds as they come. ids: int64 tokens of text."""

    model: InferenceModel
    drafter: Drafter
    caches: Caches
    ids: Tensor

    def verify(self, spans: Sequence[Span]) -> None:
        """A step of the target, and what later blocks need of it."""
        rows = arrange(spans, self.caches.pairs.shape[2], self.model.device)
        batch = Batch(
            self._text(len(rows.encoder.positions)), rows.encoder, rows.decoder, rows.decoder_rows, rows.sample_rows,
            rows.singles, rows.pairs,
        )  # fmt: skip
        output = self.model.step(batch, self.caches, features=True)
        if output.features is not None:
            self.drafter.remember(output.features, batch.decoder, self.caches)

    def draft(self, requests: int, position: int) -> None:
        """Blocks of the likeliest tokens."""
        slots = torch.arange(requests, device=self.ids.device)
        anchors = Anchors(self._text(requests), torch.full_like(slots, position), slots, torch.zeros_like(slots))
        draft(self.drafter, anchors, self.caches, lambda logits, _: logits.argmax(-1))

    def _text(self, count: int) -> Tensor:
        return self.ids[torch.arange(count, device=self.ids.device) % len(self.ids)]


@dataclass(frozen=True)
class RecordedRounds:
    """Rounds of fixed shapes."""

    steps: RecordedSteps
    drafts: RecordedDrafts

    def verify(self, spans: Sequence[Span]) -> None:
        """A step of the target, and what later blocks need of it."""
        self.steps.run(spans)

    def draft(self, requests: int, position: int) -> None:
        """Blocks of the likeliest tokens."""
        slots = torch.arange(requests, device=self.drafts.device)
        self.drafts.run(slots, torch.full_like(slots, position), torch.zeros_like(slots), None)
