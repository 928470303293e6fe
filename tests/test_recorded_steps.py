"""Decode steps in fixed shapes give what steps as they come give; replaying itself needs a GPU."""

import pytest
import torch
from model_rig import rig_of, text
from random_models import VARIANTS

from deepinfer.cache.storage import Caches
from deepinfer.core.plan import Plan, Span
from deepinfer.core.request import Request
from deepinfer.core.sampling_params import SamplingParams
from deepinfer.engine.model_runner import ModelRunner
from deepinfer.engine.recorded import Recording
from deepinfer.model.model import InferenceModel
from deepinfer.model.recorder import SIZES, Recorder
from deepinfer.ops.rows import torch as operators

each_variant = pytest.mark.parametrize("variant", ["all parts", "two ratio-2 sources", "ratio 1 only"])
LENGTHS = [13, 6, 30, 21, 9]


def runner_of(variant: str, fixed: bool) -> ModelRunner:
    rig = rig_of(variant)
    config = rig.model.config
    classes = [token % max(config.engram_compressed_vocab_size, 1) for token in range(config.vocab_size)]
    model = InferenceModel(config, rig.model.weights, classes if config.engram_layer_ids else None, operators)
    caches = Caches(config, 64, 6, 8)
    caches.page_table[:, :8] = torch.randperm(64)[:48].view(6, 8)
    return ModelRunner(model, caches, config.vocab_size, recording=Recording(model, Recorder(False)) if fixed else None)


def answers(variant: str, fixed: bool, compact: bool) -> list[list[int]]:
    """Twelve greedy tokens of each request; they begin one after the other, and end likewise."""
    torch.manual_seed(0)
    runner, rig = runner_of(variant, fixed), rig_of(variant)
    made: list[list[int]] = [[] for _ in LENGTHS]
    cuts = [length // 2 if compact else 0 for length in LENGTHS]
    number = 0

    def step(spans: list[Span]) -> None:
        nonlocal number
        tokens = runner.run(Plan(number, tuple(spans))).tokens.tolist()
        number += 1
        for span, token in zip(spans, tokens, strict=True):
            made[span.request_id].append(token)

    for request, length in enumerate(LENGTHS):
        ids = tuple(text(rig, length, seed=length))
        params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
        runner.admit(request, Request(request, None, ids, (-1,) * length, (), params, 0))
        slot, cut = 5 - request, cuts[request]
        step([Span(request, slot, 0, length, ids, 0, 0, cut, cut, True)])
    for round_ in range(11 + len(LENGTHS)):
        going = [r for r in range(len(LENGTHS)) if r <= round_ < r + 11]
        spans = [Span(r, 5 - r, LENGTHS[r] + len(made[r]) - 1, 1, None, 0, 0, cuts[r], cuts[r], True) for r in going]
        if spans:
            step(spans)
    return made


@each_variant
@pytest.mark.parametrize("compact", [False, True], ids=["off", "compact"])
def test_the_same_tokens(variant: str, compact: bool) -> None:
    assert variant in VARIANTS
    made, wanted = answers(variant, True, compact), answers(variant, False, compact)
    assert [len(tokens) for tokens in made] == [12] * len(LENGTHS)
    # A cached value may round otherwise where a step has another number of rows; then a sequence parts.
    assert sum(a == b for a, b in zip(made, wanted, strict=True)) >= len(LENGTHS) - 1


def test_which_steps_are_recorded() -> None:
    steps = runner_of("all parts", True)._recorded
    assert steps is not None
    decode = Span(0, 1, 20, 1, None, 0, 0, 4, 4, True)
    assert steps.takes([decode])
    assert steps.takes([decode] * SIZES[-1])
    assert not steps.takes([decode] * (SIZES[-1] + 1))
    assert not steps.takes([decode, Span(1, 2, 20, 2, (5, 6), 0, 0, 4, 4, True)])  # a prompt's end
    assert not steps.takes([Span(0, 1, 20, 1, None, 0, 20, 20, 20, True)])  # begins in its slot
    assert not steps.takes([Span(0, 1, 20, 1, None, 0, 0, 4, 21, False)])


def test_a_step_that_had_to_be_recorded_first_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time would spoil those of rounds."""

    def record(self: Recorder, work: object, kept: object = ()) -> object:
        self.recordings += 1
        return work

    monkeypatch.setattr(Recorder, "record", record)
    runner, ids = runner_of("ratio 1 only", True), tuple(text(rig_of("ratio 1 only"), 9))
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    runner.admit(0, Request(0, None, ids, (-1,) * 9, (), params, 0))
    runner.run(Plan(0, (Span(0, 0, 0, 9, ids, 0, 0, 0, 0, True),)))
    for number in (1, 2):
        runner.run(Plan(number, (Span(0, 0, 8 + number, 1, None, 0, 0, 0, 0, True),)))
    assert [runner.was_delayed(number) for number in (0, 1, 2, 1)] == [False, True, False, False]
