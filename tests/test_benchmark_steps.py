"""examples/benchmark.py times what it says: every decode step runs a row of every request, or there is no figure."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from benchmarking import steps
from benchmarking.rig import Rig, Shape, make_rig
from benchmarking.steps import time_decode, time_prefill

from deepinfer.core.batch import Batch


@pytest.fixture
def rig(tiny_checkpoint: Path) -> Rig:
    return make_rig(Shape(str(tiny_checkpoint), False, 1, 1 << 20, 16), 4, 60)


@pytest.mark.parametrize("prompts", [0, 2], ids=["decode alone", "behind prefill of some requests"])
def test_every_step_runs_all_requests(rig: Rig, prompts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if prompts:
        time_prefill(rig, steps.prefill_plans(rig, 40, 20, 20 * prompts), 1)
    rows: list[int] = []
    step = rig.model.step

    def counted(batch: Batch, *arguments: object, **keywords: object) -> object:
        rows.append(len(batch.ids))
        return step(batch, *arguments, **keywords)  # type: ignore[arg-type]

    monkeypatch.setattr(rig.model, "step", counted)
    timing = time_decode(rig, 4, 40, steps=3, warmup=2)
    assert rows == [4] * 5
    assert (timing.steps, timing.rows) == (3, 12)


def test_steps_that_leave_out_requests_give_no_figure(rig: Rig) -> None:
    for number in range(2):
        rig.admit(number, 40)
    ids = [(5,), None]  # of the second request the runner does not know where it is
    spans = tuple(rig.span(number, 40, ids[number], 0, 40, True) for number in range(2))
    with pytest.raises(RuntimeError, match="left out some of its requests"):
        steps._run(rig, enumerate([spans]))
