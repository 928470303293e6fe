"""scripts/check_golden.py --engine: the engine passes, a fault in it does not, and only a shown tie is excused."""

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import golden_files
import pytest
import torch
from random_models import NO_ENGRAM, tiny
from released_config import GOLDEN
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import check_golden
from golden_check import engine
from golden_check.compare import Result, errors, failing
from golden_check.data import Golden
from golden_check.engine_ties import EngineGroup
from golden_check.ties import Nudge, near_ties, other_side, run_nudged

from deepinfer.checkpoint.formats import window_fp8
from deepinfer.core.plan import Plan
from deepinfer.core.sampled import Sampled
from deepinfer.engine import model_runner
from deepinfer.model import attention, compression, model, selection, window
from deepinfer.ops import indexer
from deepinfer.reference import indexer as reference_indexer
from deepinfer.reference.indexer import Ties


@torch.inference_mode()
def engine_results(directory: Path, to_first_bad: bool = False) -> list[Result]:
    """The engine's cases alone; the others have tests of their own."""
    found: list[Result] = []
    for group in engine.engine(Golden(directory)):
        found += check_golden.compare(group)
        if to_first_bad and bad(found):
            break
    return found


MODES = ("mask", "compact")


def bad(results: list[Result]) -> set[tuple[str, str]]:
    return {(result.case, result.what) for result in results if not result.ok}


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One text and a replay of it, with ties of index scores in the last rows; in chunks of 7."""
    directory = Path(shutil.copytree(GOLDEN, tmp_path / "golden"))
    for path in directory.iterdir():
        if path.is_file() and path.stem not in ("text_fp32", "replay_fp32"):
            path.unlink()
    for name in ("text_fp32", "replay_fp32"):
        golden_files.edit(directory / f"{name}.safetensors", keep("text40.", "text40_keep20."))
    monkeypatch.setattr(engine, "CHUNKS", (7,))
    return directory


def keep(*prefixes: str) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if not name.startswith(prefixes)]:
            del tensors[name]

    return change


@pytest.fixture(scope="module")
def results(golden: Path) -> list[Result]:
    """Cut prompts and whole ones; every size of chunk that the command takes is a slow test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "CHUNKS", (7, None))
        return engine_results(golden)


class TestGolden:
    def test_all_agree(self, results: list[Result]) -> None:
        assert not bad(results)

    @pytest.mark.slow
    def test_all_agree_in_every_chunk(self, golden: Path) -> None:
        found = engine_results(golden)
        assert not bad(found)
        chunks = {what.split(", ")[1] for what in (result.what for result in found)}
        assert chunks == {"chunk 1", "chunk 7", "chunk 64", "chunk whole"}

    def test_every_prompt_in_every_mode_and_chunk(self, results: list[Result], golden: Path) -> None:
        held = Golden(golden)
        whole = [*held.file("text_fp32").cases("ids"), *held.file("vision_fp32").cases("rgb")]
        cases = {f"engine {name} off" for name in whole}
        cases |= {f"engine {name} {mode}" for name in held.file("replay_fp32").cases("logits") for mode in MODES}
        assert {result.case for result in results} == cases
        chunks = ("chunk 7", "chunk whole")
        compared = {(result.case, result.what) for result in results if "text" in result.case}
        assert {what for _, what in compared} == {f"{o}, {chunk}" for o in ("logits", "features") for chunk in chunks}
        assert len(compared) == 4 * sum("text" in case for case in cases)

    def test_only_prompts_with_ties_need_an_excuse(self, results: list[Result]) -> None:
        for result in results:
            assert bool(result.tie) == (result.error > 1e-3)
            if result.case in ("engine text1 off", "engine text16 off", "engine text17 off"):
                assert result.error < 1e-5


def test_a_batch_is_mixed(golden: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that are through with their prompt decode beside chunks of longer ones."""
    plans: list[Plan] = []
    original = model_runner.ModelRunner.run

    def run(self: model_runner.ModelRunner, plan: Plan) -> Sampled:
        plans.append(plan)
        return original(self, plan)

    monkeypatch.setattr(model_runner.ModelRunner, "run", run)
    monkeypatch.setattr(engine, "CHUNKS", (7,))
    list(engine.engine(Golden(golden)))
    mixed = [{(span.count == 1, span.sample) for span in plan.spans} for plan in plans]
    assert sum((True, True) in kinds and (False, False) in kinds for kinds in mixed) > 5


def highest_tie(scores: Tensor, count: int) -> Tensor:
    """Of equal scores the highest position."""
    found = indexer.best_positions(scores.flip(-1), count)
    return torch.where(found < 0, -1, scores.shape[-1] - 1 - found)


def without_cut(original: Any) -> Any:
    return lambda spans, *rest: original([replace(span, cut=0, decoder_from=0) for span in spans], *rest)


FAULTS: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "ties go to the highest": (selection, "best_positions", lambda _: highest_tie),
    "windows one short": (model, "plan_windows", lambda f: lambda half, window, ring: f(half, window - 1, ring)),
    "decoder not cut": (model_runner, "arrange", without_cut),
    "entries misplaced": (compression, "entry_addresses", lambda f: lambda *a: f(*a).roll(1)),
    "pending pairs dropped": (compression, "_keep", lambda _: lambda *arguments: None),
    "index queries not rounded": (attention, "index_mxfp4", lambda _: lambda x: x),
    "history forgotten": (model, "look_back", lambda f: lambda batch, past, *rest: f(batch, past.clone(), *rest)),
    "a value 1% too large": (attention, "rms_norm", lambda f: lambda x, weight, eps: f(x, weight, eps) * 1.01),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_the_engine_is_found(copy: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    module, attribute, fault = FAULTS[name]
    monkeypatch.setattr(module, attribute, fault(getattr(module, attribute)))
    assert bad(engine_results(copy, to_first_bad=True))


class TestExcuses:
    def test_a_tie_of_index_scores_is_named(self, copy: Path) -> None:
        for result in engine_results(copy):
            assert result.ok
            assert result.error > 1e-2
            assert "index layer 6" in result.tie
            assert "1 of 4 entries of equal score 0" in result.tie

    @pytest.mark.parametrize("row", [3, 39], ids=["before the tie", "after the tie"])
    def test_a_tie_excuses_no_wrong_golden_row(self, copy: Path, row: int) -> None:
        (copy / "replay_fp32.safetensors").unlink()
        golden_files.edit(copy / "text_fp32.safetensors", lambda t: t["text40.logits"][row].mul_(1.01))
        assert bad(engine_results(copy)) == {
            ("engine text40 off", f"{what}, chunk 7") for what in ("logits", "features")
        }

    def test_scores_that_differ_are_no_tie(self, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Were the reference's rules to differ in more than ties, nothing would be excused."""

        def second_best(scores: Tensor, count: int, ties: Ties) -> tuple[Tensor, Tensor]:
            values, indices = original(scores, count + 1, ties)
            skipped = values.shape[-1] > count and ties is Ties.LOWEST
            return (values[..., 1:], indices[..., 1:]) if skipped else (values[..., :count], indices[..., :count])

        original = reference_indexer.best
        monkeypatch.setattr(reference_indexer, "best", second_best)
        assert bad(engine_results(copy, to_first_bad=True))

    def test_rounding_and_index_ties_together(self, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The engine is made to round a value of the window KV that lies near its boundary the other way."""
        (copy / "replay_fp32.safetensors").unlink()
        monkeypatch.setattr(engine, "CHUNKS", (None,))
        nudge, calls, original = self.telling_nudge(copy), iter(range(1000)), window.pack_window

        def pack(kv: Tensor) -> Tensor:
            if next(calls) == nudge.call:
                kv = kv.clone()
                kv[nudge.row, nudge.channel] = other_side(kv, window_fp8(kv))[0][nudge.row, nudge.channel]
            return original(kv)

        monkeypatch.setattr(window, "pack_window", pack)
        for result in engine_results(copy):
            assert result.ok
            assert "index layer 6" in result.tie
            assert f"window KV {nudge.call}, row {nudge.row}, channel {nudge.channel}, " in result.tie

    @torch.inference_mode()
    def telling_nudge(self, directory: Path) -> Nudge:
        """A value near its boundary that moves rows of the only case."""
        (group,) = engine.engine(Golden(directory))
        assert isinstance(group, EngineGroup)
        side = group.against(group.run(), Ties.LOWEST)
        return next(nudge for nudge in near_ties(side) if failing(side, errors(side, run_nudged(side, [nudge]))))


class TestOtherModels:
    def test_a_model_without_engram_and_vision(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(engine, "CHUNKS", (7, 64))
        data = tiny(**NO_ENGRAM, hidden_size=96, sliding_window=5, index_topk=3)
        del data["vision_config"], data["image_token_id"]
        golden_files.write(tmp_path, data, lengths=(4, 30))
        found = engine_results(tmp_path)
        assert not bad(found)
        assert {result.case for result in found} == {
            "engine text4 off", "engine text30 off", "engine text30_keep7 mask", "engine text30_keep7 compact",
        }  # fmt: skip


class TestCommand:
    def test_the_engine_is_an_option(self, copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert check_golden.main([str(copy)]) == 0
        without = capsys.readouterr().out.splitlines()
        assert check_golden.main([str(copy), "--engine", "--json", str(tmp_path / "out.json")]) == 0
        lines = capsys.readouterr().out.splitlines()
        written = json.loads((tmp_path / "out.json").read_text())
        added = [line for line in lines if line.startswith("engine ")]
        assert not any(line.startswith("engine ") for line in without)
        assert lines[:-1] == without[:-1] + added
        assert written["ok"] is True
        assert [entry["case"] for entry in written["cases"]][-len(added) :] == ["engine text40 off"] * 2 + [
            f"engine text40_keep20 {mode}" for mode in MODES for _ in range(2)
        ]
        assert all("index layer" in entry["tie"] for entry in written["cases"][-len(added) :])

    def test_a_fault_exits_with_1(self, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (copy / "replay_fp32.safetensors").unlink()
        monkeypatch.setattr(selection, "best_positions", highest_tie)
        assert check_golden.main([str(copy), "--engine"]) == 1
