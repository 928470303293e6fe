"""Recorded steps of ranks that share prompts: two ranks in threads, one of which only follows."""

import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from model_rig import rig_of, text
from rank_threads import run_ranks

from deepinfer.cache.storage import Caches
from deepinfer.core.plan import Plan, Span
from deepinfer.core.request import TEXT, Request
from deepinfer.core.sampling_params import SamplingParams
from deepinfer.engine.context import Context
from deepinfer.engine.model_runner import ModelRunner
from deepinfer.engine.recorded import Recording
from deepinfer.model.model import InferenceModel
from deepinfer.model.recorder import Recorder
from deepinfer.ops.rows import torch as row_operators
from deepinfer.parallel.collectives import Collectives

LENGTHS = (40, 8, 71, 33)
STEPS = 5


class Threads:
    """Ranks that nobody watches."""

    together = nullcontext


def runner_of(drafts: bool, context_of: Any = None) -> tuple[ModelRunner, Caches, Context | None]:
    rig = rig_of("all parts")
    config = rig.model.config
    classes = [token % config.engram_compressed_vocab_size for token in range(config.vocab_size)]
    model = InferenceModel(config, rig.model.weights, classes, row_operators)
    caches = Caches(config, 64, len(LENGTHS), 8, 6)
    context = None if context_of is None else Context(model, caches, Threads(), context_of)  # type: ignore[arg-type]
    runner = ModelRunner(
        model, caches, config.vocab_size, drafter=rig.drafter if drafts else None, context=context,
        recording=Recording(model, Recorder(record=False)),
    )  # fmt: skip
    return runner, caches, context


def lead(runner: ModelRunner, drafts: bool) -> list[list[int]]:
    """The tokens of a few requests that read their prompts and decode."""
    rig, made = rig_of("all parts"), [list[int]() for _ in LENGTHS]
    pages = {number: tuple(range(12 * number, 12 * number + 12)) for number in range(len(LENGTHS))}
    for number, length in enumerate(LENGTHS):
        ids = tuple(text(rig, length, length))
        params = SamplingParams(temperature=number % 2, seq_seed=number)
        runner.admit(number, Request(number, None, ids, (TEXT,) * length, (), params, number))
    for step in range(STEPS):
        spans = []
        for number, length in enumerate(LENGTHS):
            first, count = (length - 1 + step, 1 + (3 if drafts else 0)) if step else (0, length)
            ids = None if step else tuple(text(rig, length, length))
            spans.append(Span(number, number, first, count, ids, 0, 0, 0, 0, True, length + 24))
        sampled = runner.run(Plan(step, tuple(spans), pages if not step else {}, drafting=drafts))
        for tokens, more in zip(made, sampled.lists(), strict=True):
            tokens += more
    return made


@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "drafts"])
def test_the_same_tokens_and_caches(drafts: bool) -> None:
    alone, kept, _ = runner_of(drafts)
    wanted = lead(alone, drafts)
    replayed = threading.local()

    def work(group: Collectives) -> tuple[list[list[int]], Caches, int]:
        runner, caches, context = runner_of(drafts, group)
        assert context is not None
        assert runner._recorded is not None
        replayed.count, run = 0, runner._recorded.run

        def counted(spans: Any) -> Any:
            replayed.count += 1
            return run(spans)

        runner._recorded.run = counted  # type: ignore[method-assign]
        if not context.leads:
            while context.follow():
                pass
            return [], caches, replayed.count
        made = lead(runner, drafts)
        assert not runner.stand_by()
        return made, caches, replayed.count

    (made, caches, count), (_, followed, other) = run_ranks(2, work)
    assert made == wanted
    assert count == other == STEPS - 1
    for one, two in zip(kept_of(caches), kept_of(followed), strict=True):
        assert torch.equal(one, two)
    for one, two in zip(kept_of(caches), kept_of(kept), strict=True):
        assert (one != two).float().mean() < 0.02


def kept_of(caches: Caches) -> list[torch.Tensor]:
    return [caches.windows, caches.history, *caches.latents, *caches.index_keys]
