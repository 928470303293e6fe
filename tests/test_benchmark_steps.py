"""examples/benchmark.py times what it says: every decode step runs a row of every request, or there is no figure."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import benchmark
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


def test_one_rank_of_a_group_runs_its_part(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """Of prompts; tokens of both ranks count, for both GPUs."""
    arguments = ["--model", str(tiny_checkpoint), "--context_length", "300", "--non_cached_tokens", "256"]
    path = tmp_path / "results.json"
    arguments += ["--prefill_batch_size", "256", "--prefill_rounds", "1", "--decode_num_requests", "1"]
    assert benchmark.main([*arguments, "--cp", "2", "--decode_steps", "2", "--json", str(path)]) == 0
    made = json.loads(path.read_text(encoding="utf-8"))
    prefill, decode = made["prefill"], made["decode"]
    assert prefill["rows_per_step"] == 256
    assert prefill["tokens_per_s"] == pytest.approx(128 / prefill["ms_per_step"] * 1e3)
    assert decode["tokens_per_s"] == pytest.approx(decode["avg_SPS"] * (1 + decode["drafts"]) / 2)


def test_groups_divide_the_ranks(tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", str(tiny_checkpoint), "--load_format", "random", "--ep_slice", "2", "--cp", "4"]
    assert benchmark.main(arguments) == 2
    assert "cp is 4; it must divide ep_slice, which is 2" in capsys.readouterr().err
