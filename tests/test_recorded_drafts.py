"""Blocks drafted in fixed shapes, and before the host knows behind which token; replaying itself needs a GPU."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from llm_tools import alike, check_at_rest, parts, texts
from model_rig import rig_of, text

from deepinfer import LLM, SamplingParams
from deepinfer.cache.storage import Caches
from deepinfer.core.plan import Plan, Span, Verification
from deepinfer.core.request import TEXT, Request
from deepinfer.engine import assembly
from deepinfer.engine.model_runner import ModelRunner
from deepinfer.engine.recorded import Recording
from deepinfer.model.model import InferenceModel
from deepinfer.model.recorder import SIZES, Recorder, size_for
from deepinfer.ops.rows import torch as row_operators
from deepinfer.speculative.recorded import is_plain
from deepinfer.speculative.schedule import ScheduledDrafts
from deepinfer.speculative.speculator import Speculator

LENGTHS = (5, 8, 19, 6, 11, 7, 9)
GREEDY, DRAWN = SamplingParams(temperature=0), SamplingParams(temperature=0.7, seq_seed=4)


def by_rows(model: InferenceModel) -> InferenceModel:
    """The same, attending row by row."""
    return InferenceModel(model.config, model.weights, model._classes.tolist(), row_operators)


def runner_of(fixed: bool, params: Sequence[SamplingParams], limit: int = 1000) -> tuple[ModelRunner, Speculator]:
    """Seven requests (one fewer than a shape holds) that have read their prompts and drafted blocks."""
    rig = rig_of("all parts")
    caches = Caches(rig.model.config, 64, len(LENGTHS) + 1, 8, 6)
    recording = Recording(by_rows(rig.model), Recorder(record=False)) if fixed else None
    runner = ModelRunner(rig.model, caches, rig.model.config.vocab_size, drafter=rig.drafter, recording=recording)
    spans = []
    for number, length in enumerate(LENGTHS):
        ids = tuple(text(rig, length, length))
        one = params[number % len(params)]
        runner.admit(number, Request(number, None, ids, (TEXT,) * length, (), one, 9 + number))
        spans.append(Span(number, number, 0, length, ids, 0, 0, 0, 0, True, limit))
    pages = {number: tuple(range(9 * number, 9 * number + 9)) for number in range(len(LENGTHS))}
    runner.run(Plan(0, tuple(spans), pages, drafting=True))
    assert runner._speculator is not None
    return runner, runner._speculator


@pytest.mark.parametrize("params", [[GREEDY], [GREEDY, DRAWN], [DRAWN]], ids=["greedy", "mixed", "drawn"])
def test_the_same_blocks(params: Sequence[SamplingParams], monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = runner_of(False, params)[1].blocks
    monkeypatch.setattr(Speculator, "_draft", None)  # which would draft them as they come
    found = runner_of(True, params)[1].blocks
    assert torch.equal(found.tokens, wanted.tokens)
    assert found.fresh == wanted.fresh == set(range(len(LENGTHS)))
    torch.testing.assert_close(found.survival, wanted.survival, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found.confidence, wanted.confidence, atol=1e-3, rtol=1e-3)


def test_a_block_that_nobody_can_use_is_none() -> None:
    """Behind the last token but one there is nothing to verify."""
    limit = LENGTHS[2] + 2
    assert 2 in runner_of(True, [GREEDY], limit)[1].blocks.fresh
    fresh = runner_of(True, [GREEDY], limit - 1)[1].blocks.fresh
    assert 2 not in fresh
    assert {0, 1, 3} <= fresh


def test_rows_that_fill_a_shape_up_touch_nothing_of_others() -> None:
    """21 rows in a shape of 24: a slot and a page of nobody keep what they hold."""
    runner, _ = runner_of(True, [GREEDY])
    caches = runner._caches
    others = [
        caches.windows[:, -1], caches.drafts[:, -1], caches.pairs[:, -1], caches.history[-1], caches.newest[-1:],
        caches.page_table[-1], *(part[-1] for part in (*caches.latents, *caches.index_keys)),
    ]  # fmt: skip
    for part in others:
        part.fill_(77)
    spans = tuple(
        Span(number, number, length, 3, None, 0, 0, 0, 0, True, 1000) for number, length in enumerate(LENGTHS)
    )
    counts = [len(tokens) for tokens in runner.run(Plan(1, spans, drafting=True)).lists()]
    assert all(1 <= count <= 3 for count in counts)
    assert runner._recorded is not None
    assert list(runner._recorded._recorded) == [(24, 1024)]
    assert all(bool((part == 77).all()) for part in others)


@pytest.mark.parametrize(
    ("fields", "plain"),
    [
        ({"temperature": 0, "top_k": 3, "top_p": 0.5, "min_p": 0.1}, True), ({"temperature": 1.3}, True),
        ({"temperature": 1.0, "top_k": 3}, False), ({"temperature": 1.0, "top_p": 0.9}, False),
        ({"temperature": 1.0, "min_p": 0.1}, False), ({"temperature": 0, "presence_penalty": 1.0}, False),
        ({"temperature": 0, "logit_bias": {5: 1.0}}, False), ({"temperature": 0, "min_tokens": 3}, False),
    ],
)  # fmt: skip
def test_which_requests_are_plain(fields: dict[str, object], plain: bool) -> None:
    assert is_plain(Request(0, None, (5,), (TEXT,), (), SamplingParams(**fields), 0)) is plain


def test_other_requests_are_drafted_for_as_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    cut = SamplingParams(temperature=0.7, top_p=0.8, seq_seed=4)
    ahead: list[object] = []
    real = Speculator.draft_ahead
    monkeypatch.setattr(Speculator, "draft_ahead", lambda *given: ahead.append(real(*given)) or ahead[-1])
    found, wanted = (runner_of(fixed, [GREEDY, cut])[1].blocks for fixed in (True, False))
    assert ahead == [None, None]
    assert torch.equal(found.tokens, wanted.tokens)


@pytest.mark.parametrize("count", [1, 7, 57, SIZES[-1]])
def test_sizes_waste_little(count: int) -> None:
    assert count <= size_for(count) <= max(count + 2, count * 5 // 4)


def fixed_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines are made as on a GPU from now on, except that nothing is recorded."""

    def recording(model: InferenceModel, _: object, classes: Sequence[int]) -> Recording:
        by_rows = InferenceModel(model.config, model.weights, classes, row_operators)
        return Recording(by_rows, Recorder(record=False))

    monkeypatch.setattr(assembly, "recording_of", recording)


@pytest.mark.parametrize("settings", [{}, {"varlen": True, "asynchronous": False}, {"nextn": 0}], ids=str)
def test_an_engine_of_fixed_shapes(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, object]
) -> None:
    """Requests of all kinds; random drafts are hardly ever right, so nearly every round takes rows back."""
    prompts = texts(11, 5, 3, 40)
    kinds = [
        SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
        SamplingParams(temperature=0.8, seq_seed=5, max_tokens=9, ignore_eos=True),
        SamplingParams(temperature=0, repetition_penalty=1.3, max_tokens=11, ignore_eos=True, logprobs=2),
        SamplingParams(temperature=0.9, top_p=0.9, seq_seed=6, max_tokens=10, ignore_eos=True),
    ]
    params = [kinds[place % len(kinds)] for place in range(len(prompts))]
    expected = LLM(tiny_checkpoint, nextn=0, prefix_cache=False).generate(prompts, params, use_tqdm=False)
    fixed_shapes(monkeypatch)
    llm = LLM(tiny_checkpoint, prefix_cache=False, **settings)
    recorded = parts(llm).runner._recorded
    assert recorded is not None
    assert alike(llm.generate(prompts, params, use_tqdm=False), expected) >= 0.8
    assert recorded._recorded
    check_at_rest(llm)


def test_drafts_are_chosen_without_a_look_from_the_host(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three drafts for all requests together: the tokens are those without drafts, and the host never asks which."""
    prompts = texts(9, 5, 3, 30)
    params = [
        SamplingParams(temperature=n % 2 * 0.8, seq_seed=n, max_tokens=10 + n, ignore_eos=True)
        for n in range(len(prompts))
    ]
    expected = LLM(tiny_checkpoint, nextn=0, prefix_cache=False).generate(prompts, params, use_tqdm=False)
    fixed_shapes(monkeypatch)
    monkeypatch.setattr(ScheduledDrafts, "decide", lambda self, chances: Verification(5, 3, True, True))
    chosen: list[object] = []
    choose = Speculator.choose
    monkeypatch.setattr(Speculator, "choose", lambda *given: chosen.append(choose(*given)) or chosen[-1])
    llm = LLM(tiny_checkpoint, varlen=True, prefix_cache=False, max_num_seqs=4)
    assert alike(llm.generate(prompts, params, use_tqdm=False), expected) >= 0.8
    counted = llm.statistics.speculation
    assert sum(counted.verified) > counted.rounds / 4
    assert sum(one is not None for one in chosen) > 5
    check_at_rest(llm)
