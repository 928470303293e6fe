"""A model over caches beside the reference, from one checkpoint; and a player that feeds it requests step by step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from random_models import VARIANTS, build, tensors
from torch import Tensor

from deepinfer.cache import layout
from deepinfer.cache.storage import Caches
from deepinfer.checkpoint.reader import Checkpoint
from deepinfer.checkpoint.writer import write_checkpoint
from deepinfer.core.batch import Batch
from deepinfer.core.plan import Encode, Span
from deepinfer.core.request import Request
from deepinfer.core.sampling_params import SamplingParams
from deepinfer.engine.model_runner import ModelRunner
from deepinfer.model import attention, drafter, reading, window
from deepinfer.model.drafter import Anchors, Drafter
from deepinfer.model.loading import load_drafter, load_weights
from deepinfer.model.model import InferenceModel, StepOutput
from deepinfer.ops.compressor import torch as compressor
from deepinfer.ops.rows import torch as row_operators
from deepinfer.ops.sparse_attention import torch as attend_rows
from deepinfer.reference import attention as reference_attention
from deepinfer.reference import indexer as reference_indexer
from deepinfer.reference.loading import load_reference
from deepinfer.reference.model import ReferenceModel
from deepinfer.text.images import TEXT, ImageInput

NEVER = 1 << 40  # a decoder_from that no position reaches


@dataclass(frozen=True)
class Rig:
    """The same weights twice. drafter: None where the checkpoint has no draft stages."""

    reference: ReferenceModel
    model: InferenceModel
    drafter: Drafter | None = None


def from_checkpoint(directory: Path, classes: Sequence[int] | None, dtype: torch.dtype = torch.float32) -> Rig:
    checkpoint = Checkpoint(directory)
    config, weights = checkpoint.config, load_weights(checkpoint, dtype)
    drafting = Drafter(config, load_drafter(checkpoint, dtype), weights) if config.draft_stages else None
    return Rig(load_reference(checkpoint, classes, dtype), InferenceModel(config, weights, classes), drafting)


def random_rig(directory: Path, data: dict[str, Any], seed: int = 0, dtype: torch.dtype = torch.float32) -> Rig:
    """Random weights in the shape of `data`, written to `directory` in the stored formats."""
    built = build(data, seed)
    write_checkpoint(directory, data, tensors(built))
    return from_checkpoint(directory, built.classes.tolist(), dtype)


@cache
def rig_of(variant: str, dtype: torch.dtype = torch.float32) -> Rig:
    """The rig of one of `VARIANTS`; what is mapped of its files outlives them."""
    with TemporaryDirectory() as directory:
        return random_rig(Path(directory) / "checkpoint", VARIANTS[variant](), dtype=dtype)


def text(rig: Rig, length: int, seed: int = 0) -> list[int]:
    """Random text: token ids without the image marker."""
    config, generator = rig.model.config, torch.Generator().manual_seed(7000 + seed)
    ids = torch.randint(5, config.vocab_size, (length,), generator=generator).tolist()
    return [token if token != config.image_token_id else 7 for token in ids]


def make_smooth(monkeypatch: pytest.MonkeyPatch) -> None:
    """No cache format rounds, neither in the reference nor in caches, which then hold FP32.

    Another order of summation may round a value the other way; that says nothing about what is tested here.
    """

    def pack(x: Tensor) -> Tensor:
        return x.float().contiguous().view(torch.uint8)

    def unpack(stored: Tensor, dtype: torch.dtype) -> Tensor:
        return stored.contiguous().view(torch.float32).to(dtype)

    for name in ("window_bytes", "latent_bytes", "index_bytes"):
        monkeypatch.setattr(layout, name, lambda channels: 4 * channels)
    both = ["latent", "index"]
    every = [*both, "window"]
    for module, names in (
        (window, ["window"]), (drafter, ["window"]), (compressor, both), (reading, both), (row_operators, every),
        (attend_rows, every),
    ):  # fmt: skip
        for name in names:
            if hasattr(module, f"pack_{name}"):
                monkeypatch.setattr(module, f"pack_{name}", pack)
            if hasattr(module, f"unpack_{name}"):
                monkeypatch.setattr(module, f"unpack_{name}", unpack)
    for module in (attention, row_operators):
        monkeypatch.setattr(module, "index_mxfp4", lambda x: x)
    for module, name in (
        (reference_attention, "window_fp8"),
        (reference_attention, "latent_nvfp4"),
        (reference_indexer, "index_mxfp4"),
    ):
        monkeypatch.setattr(module, name, lambda x: x)


@dataclass
class Playing:
    """One request in a slot: what it is, how far it got, and the logits and features of its decoder rows."""

    ids: list[int]
    types: list[int]
    images: Sequence[ImageInput]
    slot: int
    cut: int
    decoder_from: int
    floor: int = 0
    write_from: int = 0
    done: int = 0
    pages: list[int] = field(default_factory=list)
    logits: dict[int, Tensor] = field(default_factory=dict)
    features: dict[int, Tensor] = field(default_factory=dict)


class Player:
    """Runs spans through the model over caches that are full of garbage, and keeps every decoder row's logits."""

    def __init__(
        self, model: InferenceModel, slots: int = 4, page_size: int = 8, pages: int = 64, verify_rows: int = 1,
        seed: int = 0, drafter: Drafter | None = None,
    ) -> None:  # fmt: skip
        self.model, self.drafter = model, drafter
        self.caches = Caches(model.config, pages, slots, page_size, verify_rows, model.device)
        self.random = torch.Generator().manual_seed(seed)
        self.free_pages = torch.randperm(pages, generator=self.random).tolist()
        self.free_slots = torch.randperm(slots, generator=self.random).tolist()
        self.runner = ModelRunner(model, self.caches, model.config.vocab_size)
        self.requests: dict[int, Playing] = {}
        self.poison()

    def poison(self) -> None:
        """Any byte may be anywhere, NaN among them; a page table may name any page."""
        for stored in (*self.caches.latents, *self.caches.index_keys, self.caches.windows, self.caches.drafts):
            stored.copy_(torch.randint(0, 256, stored.shape, generator=self.random, dtype=torch.uint8))
        self.caches.pairs.fill_(torch.nan)
        table, history = self.caches.page_table, self.caches.history
        table.copy_(torch.randint(0, self.caches.pages, table.shape, generator=self.random))
        history.copy_(torch.randint(0, self.model.config.vocab_size, history.shape, generator=self.random))

    def add(
        self, ids: Sequence[int], mode: str = "off", start: int = 0, types: Sequence[int] | None = None,
        images: Sequence[ImageInput] = (), **fields: Any,
    ) -> int:  # fmt: skip
        """Begin a request whose decoder half starts at `start`; returns its id."""
        number = max(self.requests, default=-1) + 1
        kinds = [TEXT] * len(ids) if types is None else list(types)
        cut = 0 if mode == "off" else start
        playing = Playing(
            list(ids), kinds, images, self.free_slots.pop(), cut, cut if mode == "compact" else 0, **fields
        )
        playing.done = playing.floor
        self.requests[number] = playing
        self.runner.admit(number, Request(number, None, tuple(ids), tuple(kinds), tuple(images), SamplingParams(), 0))
        if self.runner.vision is not None:
            blocks = len(self.model.weights.vision.blocks)
            encodes = [Encode(image.digest, number, n, 0, blocks, True) for n, image in enumerate(images)]
            with torch.inference_mode():
                assert not self.runner.vision.run(encodes, lambda encode: images[encode.place])
        return number

    def end(self, number: int) -> Playing:
        """Give the request's slot and pages back."""
        playing = self.requests.pop(number)
        self.free_slots.append(playing.slot)
        self.free_pages += playing.pages
        self.runner.forget(number)
        return playing

    def span(self, number: int, count: int) -> Span:
        """The next `count` rows of a request, with pages for them."""
        playing = self.requests[number]
        first, end = playing.done, playing.done + count
        while len(playing.pages) * self.caches.page_size < end:
            playing.pages.append(self.free_pages.pop())
        self.caches.page_table[playing.slot, : len(playing.pages)] = torch.tensor(playing.pages)
        ids = tuple(playing.ids[first:end])
        assert len(ids) == count
        return Span(
            number, playing.slot, first, count, ids, playing.write_from, playing.floor, playing.cut,
            playing.decoder_from, False,
        )  # fmt: skip

    @torch.inference_mode()
    def step(self, counts: Mapping[int, int], drafted_from: Sequence[Tensor] | None = None) -> StepOutput:
        """Run `counts[number]` more rows of each request in one step.

        `drafted_from`: features [T, F] of each request that the drafter reads instead of those that the step gives.
        """
        spans = [self.span(number, count) for number, count in counts.items()]
        batch = self.runner.batch(spans)
        rows = torch.arange(len(batch.decoder_rows), device=self.model.device)
        output = self.model.step(self.part_of(replace(batch, sample_rows=rows), spans), self.caches, features=True)
        assert output.features is not None
        slots, positions = batch.decoder.slots.tolist(), batch.decoder.positions.tolist()
        if self.drafter is not None:
            numbers = {playing.slot: number for number, playing in self.requests.items()}
            features = output.features
            if drafted_from is not None:
                rows = zip(slots, positions, strict=True)
                features = torch.stack([drafted_from[numbers[slot]][position] for slot, position in rows])
            self.drafter.remember(features, batch.decoder, self.caches)
        by_slot = {playing.slot: playing for playing in self.requests.values()}
        for row, (slot, position) in enumerate(zip(slots, positions, strict=True)):
            by_slot[slot].logits[position] = output.logits[row]
            by_slot[slot].features[position] = output.features[row]
        for number, count in counts.items():
            self.requests[number].done += count
        return output

    def part_of(self, batch: Batch, spans: Sequence[Span]) -> Batch:
        """What of a step is run here: all of it."""
        return batch

    def anchors(self, ids: Mapping[int, int]) -> Anchors:
        """The given tokens as anchors behind what the requests have run."""
        playing = [self.requests[number] for number in ids]
        columns = [
            list(ids.values()),
            [one.done for one in playing],
            [one.slot for one in playing],
            [max(one.floor, one.decoder_from) for one in playing],
        ]
        return Anchors(*torch.tensor(columns))

    def run(self, number: int, chunk: int) -> Playing:
        """Run a request to its end, alone, in chunks."""
        playing = self.requests[number]
        while playing.done < len(playing.ids):
            self.step({number: min(chunk, len(playing.ids) - playing.done)})
        return playing


@torch.inference_mode()
def expected(rig: Rig, playing: Playing) -> tuple[int, Tensor, Tensor]:
    """What the reference computes for the request's tokens so far: (first row, logits [R, vocab], features [R, F])."""
    length = playing.done
    replayed = None if playing.cut == 0 else torch.tensor([playing.cut])
    output = rig.reference(
        torch.tensor([playing.ids[:length]]),
        torch.tensor([playing.types[:length]]),
        playing.images,
        replayed,
        compact=playing.decoder_from > 0,
    )
    return output.first, output.logits[0], output.features[0]


def error(rig: Rig, playing: Playing) -> float:
    """The worst row's relative error over logits and features; every decoder row must have run exactly once."""
    first, logits, features = expected(rig, playing)
    assert sorted(playing.logits) == list(range(first, playing.done))
    found = []
    for wanted, rows in ((logits, playing.logits), (features, playing.features)):
        made = torch.stack([rows[position] for position in sorted(rows)])
        found.append(((made - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max().item())
    return max(found)
