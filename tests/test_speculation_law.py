"""The law of sampled tokens is the target's, whatever is drafted and however many drafts are verified.

Thousands of requests of a little Markov chain go through the sampler and the speculator at once: a drafter that errs,
confidence that depends on the tokens drafted, cut-offs, penalties and masks. The first two tokens of all are compared
with their exact law by a chi-square test. All seeds are fixed, so a test passes always or never.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from deepinfer.core.plan import Span
from deepinfer.core.request import TEXT, Request
from deepinfer.core.sampled import SampledRow, TokenMasks
from deepinfer.core.sampling_params import SamplingParams
from deepinfer.model.drafter import Anchors, Block
from deepinfer.sampling.sampler import Sampler
from deepinfer.speculative.calibration import Calibration
from deepinfer.speculative.speculator import Speculator

VOCABULARY, BLOCK, REQUESTS = 6, 3, 2500
PROMPT = (1, 3)
GENERATOR = torch.Generator().manual_seed(3)
TARGET = torch.randn(VOCABULARY, VOCABULARY, generator=GENERATOR) * 1.2  # logits of the token after each token
DRAFTED = TARGET + torch.randn(VOCABULARY, VOCABULARY, generator=GENERATOR) * 1.0
ALLOWED = torch.tensor([0b110101], dtype=torch.int32)  # a grammar that forbids tokens 1 and 3

PARAMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.15},
    "penalties": {"presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.4},
    "bias": {"logit_bias": {2: 1.0, 4: -2.0}},
    "grammar": {},
}


@dataclass
class Drafter:
    """Drafts by another chain; confident where the token before is even."""

    block_size: int = BLOCK
    device: torch.device = torch.device("cpu")  # noqa: RUF009

    def block(self, anchors: Anchors, caches: object) -> Block:
        rows = len(anchors.ids)
        return Block(torch.zeros(rows, BLOCK, 1), torch.zeros(rows, BLOCK, VOCABULARY))

    def bias(self, previous: Tensor) -> Tensor:
        return DRAFTED[previous]

    def confidence(self, hidden: Tensor, previous: Tensor) -> Tensor:
        return torch.where(previous % 2 == 0, 2.0, -2.0)


class World:
    """Many requests that have read the prompt, one in each slot, their first token about to be drawn."""

    def __init__(self, kind: str, rejection: bool) -> None:
        self.masked, self.rejection = kind == "grammar", rejection
        self.params = SamplingParams(**{"max_tokens": 9, **PARAMS[kind]})
        self.sampler = Sampler(torch.zeros(VOCABULARY, dtype=torch.bool), REQUESTS, 0)
        caches = SimpleNamespace(slots=REQUESTS)
        identity = Calibration.identity(BLOCK)
        self.speculator = Speculator(cast(Any, Drafter()), self.sampler, cast(Any, caches), identity, rejection)
        for number in range(REQUESTS):
            request = Request(number, None, PROMPT, (TEXT,) * len(PROMPT), (), self.params, 1000 + number)
            self.sampler.admit(number, request)
            self.speculator.admit(number, request)
        slots = torch.arange(REQUESTS)
        spans = [Span(number, number, 0, 2, PROMPT, 0, 0, 0, 0, True) for number in range(REQUESTS)]
        self._read(spans, slots.repeat_interleave(2), torch.tensor(PROMPT).repeat(REQUESTS), None)

    def _read(self, spans: list[Span], slots: Tensor, ids: Tensor, places: Tensor | None) -> None:
        """Tell the sampler of rows, as the runner does."""
        positions = torch.tensor([position for span in spans for position in range(span.first, span.end)])
        rows = torch.arange(len(ids))
        batch = SimpleNamespace(
            encoder=SimpleNamespace(slots=slots, positions=positions), ids=ids, decoder_rows=rows,
            sample_rows=rows if places is None else places,
        )  # fmt: skip
        self.sampler.read(spans, cast(Any, batch))

    def masks(self, rows: int) -> TokenMasks | None:
        return TokenMasks(torch.arange(rows), ALLOWED.expand(rows, 1)) if self.masked else None

    def first_two(self, total: int | None) -> Tensor:
        """int64 [R, 2]: one round behind the prompt's last token as if it were the newest, and what it leaves open.

        total: how many drafts are verified in all; None: all of them.
        """
        newest, places = torch.full((REQUESTS,), PROMPT[-1]), [len(PROMPT) - 1] * REQUESTS
        begin = [Span(number, number, 1, 1, None, 0, 0, 0, 0, True) for number in range(REQUESTS)]
        self.speculator.draft(begin, newest, places, True)
        spans = [Span(number, number, 1, 1 + BLOCK, None, 0, 0, 0, 0, True) for number in range(REQUESTS)]
        if total is not None:
            spans = self.speculator.trim(spans, total)
        ids = torch.cat(
            [torch.cat((newest[:1], self.speculator.blocks.tokens[span.slot, : span.drafts])) for span in spans]
        )
        sampled = self.speculator.sample(TARGET[ids].clone(), spans, self.masks(len(ids)))
        assert sampled.counts is not None
        tokens, counts = sampled.tokens, sampled.counts
        found = torch.cat((tokens, tokens.new_zeros(REQUESTS, 1)), 1)[:, :2]
        open_ = (counts == 1).nonzero()[:, 0].tolist()
        rows = [SampledRow(number, number, len(PROMPT) + 1) for number in open_]
        logits = TARGET[found[open_, 0]].clone()
        weights = self.sampler.adjust(logits, rows, self.masks(len(rows)), found[open_, :1])
        found[open_, 1] = self.sampler.draw(weights, rows)
        self.accepted = (counts - 1).float().mean().item()
        return found

    def law(self) -> Tensor:
        """The exact law of the first two tokens, FP64 [V, V], by the sampler's own weights."""
        row = [SampledRow(0, 0, len(PROMPT))]
        first = self.sampler.adjust(TARGET[PROMPT[-1]][None].clone(), row, self.masks(1)).double().softmax(-1)[0]
        rows = [SampledRow(0, 0, len(PROMPT) + 1)] * VOCABULARY
        every = torch.arange(VOCABULARY)[:, None]
        second = self.sampler.adjust(TARGET.clone(), rows, self.masks(VOCABULARY), every).double().softmax(-1)
        return first[:, None] * second


def chi_square(found: Tensor, law: Tensor) -> float:
    """Standard deviations by which the statistic exceeds its mean (Wilson and Hilferty's approximation)."""
    counts = torch.bincount(found[:, 0] * VOCABULARY + found[:, 1], minlength=VOCABULARY**2).double()
    expected = law.flatten() * len(found)
    assert not counts[expected == 0].any()
    likely = expected >= 5
    rest, seen = expected[~likely].sum(), counts[~likely].sum()
    terms = (counts - expected)[likely].square() / expected[likely]
    statistic, freedom = terms.sum().item(), int(likely.sum()) - 1
    if rest >= 5:
        statistic, freedom = statistic + ((seen - rest).square() / rest).item(), freedom + 1
    spread = 2 / (9 * freedom)
    return float(((statistic / freedom) ** (1 / 3) - (1 - spread)) / spread**0.5)


@pytest.mark.parametrize(
    ("kind", "total", "rule"),
    [
        *((kind, None, "rejection") for kind in PARAMS),
        *((kind, REQUESTS, "rejection") for kind in ("plain", "top_k", "penalties")),
        *((kind, total, "equality") for kind, total in (("plain", REQUESTS), ("top_p", None), ("penalties", None))),
    ],
)
def test_the_law_is_the_targets(kind: str, total: int | None, rule: str) -> None:
    """`total`: drafts verified of all requests together, chosen by confidence; None: all of them."""
    world = World(kind, rule == "rejection")
    law = world.law()
    assert chi_square(world.first_two(total), law) < 3.5
    assert world.accepted > 0.25


def test_the_test_can_fail() -> None:
    """Drafts that are accepted as they come have the drafter's law."""
    world = World("plain", True)
    world.speculator._judge = lambda layout, agrees, choices: (  # type: ignore[method-assign]
        torch.cat((layout.drafts, layout.drafts[:, :1]), 1), layout.counts + 1
    )  # fmt: skip
    assert chi_square(world.first_two(None), world.law()) > 10


def test_rejection_accepts_no_fewer_than_equality() -> None:
    accepted = {}
    for rule in (True, False):
        world = World("plain", rule)
        world.first_two(None)
        accepted[rule] = world.accepted
    assert accepted[True] >= accepted[False]
