"""examples/benchmark.py times what it says: every decode step runs a row of every request, or there is no figure."""

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import benchmark
from benchmarking import idle, steps
from benchmarking.idle import _gaps
from benchmarking.rig import Rig, Shape, make_rig, sliced
from benchmarking.steps import time_decode, time_prefill

from deepinfer.config.released import RELEASED, released_config
from deepinfer.core.batch import Batch


@pytest.fixture
def rig(tiny_checkpoint: Path) -> Rig:
    return make_rig(Shape(str(tiny_checkpoint), False, 1, 1 << 20, 16), 4, 60)


def rows_of_steps(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of rows of all steps that the model runs from now on."""
    rows: list[int] = []
    step = rig.model.step

    def counted(batch: Batch, *arguments: object, **keywords: object) -> object:
        rows.append(len(batch.ids))
        return step(batch, *arguments, **keywords)  # type: ignore[arg-type]

    monkeypatch.setattr(rig.model, "step", counted)
    return rows


@pytest.mark.parametrize("prompts", [0, 2], ids=["decode alone", "behind prefill of some requests"])
def test_every_step_runs_all_requests(rig: Rig, prompts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if prompts:
        time_prefill(rig, steps.prefill_plans(rig, 40, 20, 20 * prompts), 1)
    rows = rows_of_steps(rig, monkeypatch)
    timing = time_decode(rig, 4, 40, steps=3, warmup=2)
    assert rows == [4] * 5
    assert (timing.steps, timing.rows) == (3, 12)


def test_steps_with_drafts_run_them_all(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_rig(Shape(str(tiny_checkpoint), False, 1, 1 << 20, 16, nextn=9), 3, 100)
    assert rig.drafts == 5, "as many as the checkpoint's block has"
    rows = rows_of_steps(rig, monkeypatch)
    timing = time_decode(rig, 3, 40, steps=2, warmup=2)
    assert rows == [3, 18, 18, 18], "the first step has no drafts behind it yet"
    assert (timing.steps, timing.rows) == (2, 36)


def test_a_rank_holds_its_part_of_the_redundant_experts() -> None:
    def experts(ep_slice: int, extra: int, nextn: int = 0) -> tuple[int, int, int]:
        shape = Shape(RELEASED, True, ep_slice, 1 << 20, 64, nextn=nextn, extra_experts=extra)
        config = sliced(released_config(), shape)
        return config.n_routed_experts, config.dspark_n_routed_experts, config.draft_stages

    assert experts(8, 32, nextn=5) == (52, 16, 3)
    assert experts(8, 33) == (53, 16, 0), "rounded up to a multiple of the ranks"
    assert experts(1, 32) == (384, 128, 0), "a single rank has all experts once"


def test_gaps_between_steps() -> None:
    """The second half counts: from 5,000 on the device waits for 400 of 4,000 us; 50 us are no wait."""
    ranges = [(0.0, 3000.0), (5000.0, 6000.0), (5500.0, 7000.0), (7050.0, 8000.0), (8400.0, 9000.0)]
    found = _gaps(ranges, 3)
    assert (found.steps, found.share, found.longest) == (3, pytest.approx(0.1), 400.0)


def test_the_loop_decodes_what_counts_as_cached(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_rig(Shape(str(tiny_checkpoint), False, 1, 1 << 20, 16, nextn=2), 3, 200)
    seen: list[int] = []
    monkeypatch.setattr(torch.profiler, "profile", lambda **_: nullcontext(SimpleNamespace(events=list)))
    monkeypatch.setattr(idle, "_gaps", lambda ranges, steps: seen.append(steps))
    idle.measure_idle(rig, 3, 150, 6)
    assert seen[0] >= 3
    with pytest.raises(RuntimeError, match="no step decoded all requests"):
        idle.measure_idle(rig, 3, 150, 1)


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
