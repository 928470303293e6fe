"""Measures what rounds cost: the target over some rows, and blocks for some requests."""

import platform
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from deepinfer.cache.storage import Caches
from deepinfer.core.batch import Batch
from deepinfer.core.plan import Span
from deepinfer.model.batching import arrange
from deepinfer.model.drafter import Anchors, Drafter
from deepinfer.model.model import InferenceModel
from deepinfer.speculative.drafting import draft
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


@torch.inference_mode()
def measure(model: InferenceModel, drafter: Drafter, caches: Caches, ids: Sequence[int]) -> Measured:
    """Time steps of all sizes over `caches` that no request uses; `ids` are those of real text, to run again and again.

    What is written lies where nothing is kept; page tables are left as new.
    """
    slots, depth = caches.slots, caches.ring - model.config.sliding_window
    sizes = _tiers(slots)
    caches.page_table.copy_(torch.arange(caches.page_table.numel()).view_as(caches.page_table) % caches.pages)
    first = min(_CONTEXT, caches.page_table.shape[1] * caches.page_size - depth)
    tokens = torch.tensor(ids, device=model.device)
    steps = [(size, 1) for size in sizes] + [(slots, count) for count in range(2, depth + 1)]
    verify = [_time(model, partial(_verify, model, drafter, caches, tokens, *step, first)) for step in steps]
    drafting = [_time(model, partial(_draft, drafter, caches, tokens, size, first)) for size in sizes]
    caches.page_table.zero_()
    rows = tuple(requests * count for requests, count in steps)
    return Measured(rows, tuple(verify), tuple(sizes), tuple(drafting))


def _tiers(most: int) -> list[int]:
    """1, 2, 4, ... and `most`."""
    sizes: list[int] = []
    while not sizes or 2 * sizes[-1] < most:
        sizes.append(2 * sizes[-1] if sizes else 1)
    return sizes if sizes[-1] == most else [*sizes, most]


def _time(model: InferenceModel, action: Callable[[], object]) -> float:
    taken = []
    for _ in range(1 + _TIMES):
        begin = time.perf_counter()
        action()
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - begin)
    return median(taken[1:])


def _verify(
    model: InferenceModel, drafter: Drafter, caches: Caches, ids: Tensor, requests: int, count: int, first: int
) -> None:
    """A step of `count` rows for each of some requests."""
    spans = [Span(slot, slot, first, count, None, 0, 0, 0, 0, True) for slot in range(requests)]
    rows = arrange(spans, caches.pairs.shape[2], model.device)
    text = ids[torch.arange(requests * count, device=ids.device) % len(ids)]
    batch = Batch(
        text, rows.encoder, rows.decoder, rows.decoder_rows, rows.sample_rows, rows.singles, rows.pairs
    )  # fmt: skip
    output = model.step(batch, caches, features=True)
    if output.features is not None:
        drafter.remember(output.features, batch.decoder, caches)


def _draft(drafter: Drafter, caches: Caches, ids: Tensor, requests: int, first: int) -> None:
    slots = torch.arange(requests, device=ids.device)
    anchors = Anchors(ids[slots % len(ids)], torch.full_like(slots, first), slots, torch.zeros_like(slots))
    draft(drafter, anchors, caches, lambda logits, _: logits.argmax(-1))
