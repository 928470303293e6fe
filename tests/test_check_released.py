"""The released shape's check, on a small model and a CPU: by rows and by groups, and steps of fixed shapes."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from deepinfer.engine.model_runner import ModelRunner
from deepinfer.engine.recorded import Recording
from deepinfer.model.model import InferenceModel
from deepinfer.model.recorder import Recorder
from deepinfer.ops.rows import torch as operators

ROOT = Path(__file__).resolve().parents[1]
for folder in ("scripts", "examples"):
    sys.path.insert(0, str(ROOT / folder))

import check_released  # noqa: E402
from benchmarking.rig import Rig, Shape, make_rig  # noqa: E402


@pytest.fixture(scope="module")
def rig(golden_checkpoint: Path) -> Rig:
    """By rows, with the PyTorch operators."""
    made = make_rig(Shape(str(golden_checkpoint), False, 1, 1 << 20, 16), 3, 2100)
    model = InferenceModel(made.config, made.model.weights, classes_of(made), operators)
    recording = Recording(model, Recorder(record=False))
    runner = ModelRunner(model, made.caches, made.config.vocab_size, recording=recording)
    return replace(made, model=model, runner=runner)


def classes_of(rig: Rig) -> list[int]:
    return [token % rig.config.engram_compressed_vocab_size for token in range(rig.config.vocab_size)]


@torch.inference_mode()
def test_layers_agree(rig: Rig) -> None:
    groups = InferenceModel(rig.config, rig.model.weights, classes_of(rig))
    request = rig.admit(0, 90)
    rig.caches.newest[0] = 7
    for ids, first in ((request.token_ids, 0), (None, 90)):
        found = check_released.differences(rig, groups, rig.runner.batch([rig.span(0, first, ids, 0, 90, True)]))
        assert len(found) == rig.config.num_hidden_layers
        assert max(found) < 1e-4


@torch.inference_mode()
def test_layers_that_differ_are_seen(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = InferenceModel(rig.config, rig.model.weights, classes_of(rig))
    request = rig.admit(0, 40)
    batch = rig.runner.batch([rig.span(0, 0, request.token_ids, 0, 40, True)])
    attend = operators.attend
    monkeypatch.setattr(operators, "attend", lambda *parts: attend(*parts) * 1.3)
    assert max(check_released.differences(rig, groups, batch)) > check_released.LIMIT


@torch.inference_mode()
def test_steps_agree(rig: Rig) -> None:
    assert check_released.recorded_agree(rig, 3)
