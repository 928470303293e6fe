"""Taking rows back: after every round all that a later step can see is what a run without drafts would have left.

Drafts are forced to be all wrong, all right or either by chance. Formats do not round (see `make_smooth`), so states
of other batches agree closely. Positions in the plans are the least possible, as if each was made a step ahead.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from model_rig import Rig, make_smooth, random_rig, rig_of, text
from random_models import tiny
from torch import Tensor

from deepinfer.cache.storage import Caches
from deepinfer.core.plan import Plan, Span
from deepinfer.core.request import TEXT, Request
from deepinfer.core.sampled import Sampled
from deepinfer.core.sampling_params import SamplingParams
from deepinfer.engine.model_runner import ModelRunner
from deepinfer.engine.recorded import Recording
from deepinfer.model.model import InferenceModel
from deepinfer.model.recorder import Recorder
from deepinfer.ops.rows import torch as row_operators

PAGE = 4
PAGES_EACH = 25
ROUNDS = 4
Pattern = Callable[[int], bool]
"""Whether the k-th draft of all is to be right."""


@pytest.fixture(autouse=True)
def smooth(monkeypatch: pytest.MonkeyPatch) -> None:
    make_smooth(monkeypatch)


def request(ids: Sequence[int], params: SamplingParams | None = None) -> Request:
    return Request(0, None, tuple(ids), (TEXT,) * len(ids), (), params or SamplingParams(temperature=0), 0)


@dataclass
class Engine:
    """A runner with one request in each slot, decoding in steps of `depth` drafts."""

    rig: Rig
    prompts: Sequence[Sequence[int]]
    depth: int
    starts: Sequence[int]  # of the decoder halves
    pattern: Pattern | None = None
    truth: Sequence[Sequence[int]] = ()
    fixed: bool = False  # whether steps and drafting have fixed shapes, as if they were to be recorded
    made: list[list[int]] = field(default_factory=list)
    steps: int = 0

    def __post_init__(self) -> None:
        config = self.rig.model.config
        self.caches = Caches(config, PAGES_EACH * len(self.prompts), len(self.prompts), PAGE, self.depth + 1)
        for stored in (self.caches.windows, self.caches.drafts, *self.caches.latents, *self.caches.index_keys):
            stored.view(torch.float32).fill_(torch.nan)
        recording = Recording(by_rows(self.rig.model), Recorder(record=False)) if self.fixed else None
        self.runner = ModelRunner(
            self.rig.model, self.caches, config.vocab_size, drafter=self.rig.drafter, recording=recording
        )
        self.made = [[] for _ in self.prompts]
        self.forced = 0
        speculator = self.runner._speculator
        assert speculator is not None
        real = speculator._draft

        def draft(spans: Sequence[Span], newest: Tensor, positions: Sequence[int]) -> Tensor:
            chances = real(spans, newest, positions)
            for span, position in zip(spans, positions, strict=True):
                self._force(span.slot, position)
            return chances

        known = speculator.drafted

        def drafted(spans: Sequence[Span], positions: Sequence[int]) -> None:
            known(spans, positions)
            for span, position in zip(spans, positions, strict=True):
                self._force(span.slot, position)

        if self.pattern is not None:
            speculator._draft, speculator.drafted = draft, drafted
        spans = []
        for slot, prompt in enumerate(self.prompts):
            self.runner.admit(slot, request(prompt))
            spans.append(self._span(slot, 0, len(prompt), tuple(prompt)))
        pages = {
            slot: tuple(range(slot, PAGES_EACH * len(self.prompts), len(self.prompts))) for slot in range(len(spans))
        }
        self._take(self.runner.run(Plan(0, tuple(spans), pages, drafting=True)))

    def _force(self, slot: int, position: int) -> None:
        known = [*self.prompts[slot], *self.truth[slot]]
        for place in range(self.depth):
            right = known[position + 1 + place]
            assert self.pattern is not None
            token = right if self.pattern(self.forced) else 5 + (right + 1) % 50
            self.runner._speculator.blocks.tokens[slot, place] = token
            self.forced += 1

    def _span(self, slot: int, first: int, count: int, ids: tuple[int, ...] | None) -> Span:
        start = self.starts[slot]
        return Span(slot, slot, first, count, ids, 0, 0, start, start, True, PAGES_EACH * PAGE)

    def _take(self, sampled: Sampled) -> None:
        for made, tokens in zip(self.made, sampled.lists(), strict=True):
            made += tokens
        self.steps += 1

    def step(self, verified: int | None = None) -> None:
        spans = [
            self._span(slot, len(prompt) + self.steps - 1, 1 + self.depth, None)
            for slot, prompt in enumerate(self.prompts)
        ]
        self._take(self.runner.run(Plan(self.steps, tuple(spans), verified=verified, drafting=True)))

    def visible(self, slot: int, length: int) -> dict[str, Tensor]:
        """What steps of a request whose first `length` tokens have run can see, as FP32."""
        caches, config = self.caches, self.rig.model.config
        start, seen = self.starts[slot], {}
        for layer, ring in enumerate(caches.windows):
            lowest = max(start if layer >= config.decoder_start else 0, length - config.sliding_window + 1)
            seen[f"window {layer}"] = _floats(ring[slot, torch.arange(lowest, length) % caches.ring])
        for stage, ring in enumerate(caches.drafts):
            positions = torch.arange(max(start, length - config.sliding_window), length)
            seen[f"draft window {stage}"] = _floats(ring[slot, positions % caches.ring])
        for number, source in enumerate(caches.layout.sources):
            for name, part in (("latent", caches.latents[number]), ("index key", caches.index_keys[number])):
                entries = part[caches.page_table[slot]].flatten(0, 1)[: length // source.ratio]
                seen[f"{name} {number}"] = _floats(entries)
        for number, pairs in enumerate(caches.pairs):
            if length % 2:
                seen[f"pair {number}"] = pairs[slot, length // 2 % pairs.shape[1]]
        if caches.layout.lookback:
            positions = torch.arange(max(0, length - caches.layout.lookback), length)
            seen["history"] = caches.history[slot, positions % caches.history.shape[1]].float()
        return seen


def by_rows(model: InferenceModel) -> InferenceModel:
    """The same, attending row by row."""
    return InferenceModel(model.config, model.weights, model._classes.tolist(), row_operators)


def _floats(stored: Tensor) -> Tensor:
    return stored.contiguous().view(torch.float32)


@cache
def deep_rig() -> Rig:
    """Blocks of 9 drafts, deeper than the window of 6."""
    with TemporaryDirectory() as directory:
        return random_rig(Path(directory) / "checkpoint", tiny(dspark_block_size=9))


@cache
def plain(rig: Rig, starts: tuple[int, ...], count: int) -> tuple[tuple[int, ...], ...]:
    """Greedy tokens without drafts."""
    engine = Engine(rig, [text(rig, length, length) for length in LENGTHS], 0, starts)
    for _ in range(count):
        engine.step()
    return tuple(map(tuple, engine.made))


PATTERNS: dict[str, Pattern] = {
    "none": lambda k: False,
    "all": lambda k: True,
    "chance": lambda k: random.Random(k).random() < 0.7,
}
LENGTHS = (5, 8, 19)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize(
    ("variant", "depth", "suffix"),
    [
        ("all parts", 5, 0), ("all parts", 1, 9), ("two ratio-2 sources", 5, 11), ("ratio 2 only", 4, 0),
        ("no Engram", 2, 7), ("deep", 9, 0), ("deep", 7, 10),
    ],
)  # fmt: skip
def test_state_after_every_round(variant: str, depth: int, suffix: int, pattern: str) -> None:
    rig = deep_rig() if variant == "deep" else rig_of(variant)
    prompts = [text(rig, length, length) for length in LENGTHS]
    starts = tuple(max(0, length - suffix) for length in LENGTHS) if suffix else (0,) * len(LENGTHS)
    truth = plain(rig, starts, (ROUNDS + 1) * (depth + 1) + depth)
    engine = Engine(rig, prompts, depth, starts, PATTERNS[pattern], truth)
    for number in range(ROUNDS):
        engine.step()
        for slot, made in enumerate(engine.made):
            assert made == list(truth[slot][: len(made)])
            if pattern == "all":
                assert len(made) == 1 + (number + 1) * (depth + 1)
            if pattern == "none":
                assert len(made) == 2 + number
        run = [[*prompt, *made[:-1]] for prompt, made in zip(prompts, engine.made, strict=True)]
        fresh = Engine(rig, run, depth, starts)
        for slot, ids in enumerate(run):
            wanted, found = fresh.visible(slot, len(ids)), engine.visible(slot, len(ids))
            assert wanted.keys() == found.keys()
            for name, value in wanted.items():
                torch.testing.assert_close(found[name], value, atol=2e-4, rtol=2e-4, msg=lambda m, n=name: f"{n}: {m}")


QUICK = [("all parts", 5, 9, 7, "chance"), ("two ratio-2 sources", 5, 11, None, "all")]
SLOW = [
    ("all parts", 5, 0, None, "all"), ("all parts", 1, 0, 0, "all"), ("ratio 2 only", 4, 0, 5, "chance"),
    ("no Engram", 2, 7, None, "none"), ("two ratio-2 sources", 5, 11, None, "chance"), ("deep", 9, 0, 13, "chance"),
    ("deep", 7, 10, None, "none"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("variant", "depth", "suffix", "verified", "pattern"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_state_after_every_round_of_fixed_shapes(
    variant: str, depth: int, suffix: int, verified: int | None, pattern: str
) -> None:
    """Rows by themselves, the first one repeated to fill a shape up; with `verified`, requests of unequal drafts."""
    rig = deep_rig() if variant == "deep" else rig_of(variant)
    prompts = [text(rig, length, length) for length in LENGTHS]
    starts = tuple(max(0, length - suffix) for length in LENGTHS) if suffix else (0,) * len(LENGTHS)
    truth = plain(rig, starts, (ROUNDS + 1) * (depth + 1) + depth)
    engine = Engine(rig, prompts, depth, starts, PATTERNS[pattern], truth, fixed=True)
    for _ in range(ROUNDS):
        engine.step(verified)
        for slot, made in enumerate(engine.made):
            assert made == list(truth[slot][: len(made)])
    if verified is None and pattern == "all":
        assert [len(made) for made in engine.made] == [1 + ROUNDS * (depth + 1)] * len(LENGTHS)
    run = [[*prompt, *made[:-1]] for prompt, made in zip(prompts, engine.made, strict=True)]
    fresh = Engine(rig, run, depth, starts)
    for slot, ids in enumerate(run):
        for name, value in fresh.visible(slot, len(ids)).items():
            found = engine.visible(slot, len(ids))[name]
            torch.testing.assert_close(found, value, atol=2e-4, rtol=2e-4, msg=lambda m, n=name: f"{n}: {m}")


def test_a_limit_stops_drafts_and_then_the_request() -> None:
    """The plan's spans reserve for more than is left; the runner runs no row at or behind the limit."""
    rig = rig_of("all parts")
    truth = plain(rig, (0, 0, 0), (ROUNDS + 1) * 6 + 5)
    engine = Engine(rig, [text(rig, LENGTHS[1], LENGTHS[1])], 5, [0], PATTERNS["all"], [truth[1]])
    length, limit = LENGTHS[1], LENGTHS[1] + 9
    span = Span(0, 0, length, 6, None, 0, 0, 0, 0, True, limit)
    counts = [len(engine.runner.run(Plan(number, (span,), drafting=True)).lists()[0]) for number in range(1, 4)]
    assert counts == [6, 3, 0]


def test_a_request_without_a_newest_token_is_left_out() -> None:
    """As when the step that was to sample it has failed."""
    rig = rig_of("all parts")
    engine = Engine(rig, [text(rig, 5, 5)], 5, [0])
    before = engine.caches.windows.clone()
    engine.runner.admit(7, request([6, 7, 8]))
    span = Span(7, 0, 3, 6, None, 0, 0, 0, 0, True, 20)
    assert engine.runner.run(Plan(1, (span,), drafting=True)).lists() == [[]]
    assert torch.equal(engine.caches.windows, before)
