"""scripts/check_golden.py: it passes on the golden data and on other models, and sees every kind of fault."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import golden_files
import pytest
import torch
from random_models import NO_ENGRAM, tiny
from released_config import GOLDEN, edited
from safetensors.torch import load_file
from torch import Tensor

SCRIPTS = Path(__file__).parents[1] / "scripts"
sys.path.insert(0, str(SCRIPTS))

import check_golden  # noqa: E402
from golden_check.compare import Report, row_errors  # noqa: E402


def other_model() -> dict[str, object]:
    """Another schedule than the golden one, without vision and Engram."""
    data = tiny(**NO_ENGRAM, hidden_size=96, sliding_window=5, index_topk=3, dspark_block_size=3, rope_scaling=None)
    del data["vision_config"], data["image_token_id"]
    return data


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("other")
    golden_files.write(directory, other_model())
    return directory


@pytest.fixture(scope="module")
def report(golden: Path) -> Report:
    return check_golden.check(golden)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The project's golden data, to be damaged."""
    return Path(shutil.copytree(GOLDEN, tmp_path / "golden"))


def keep(directory: Path, *names: str) -> None:
    """Remove all data but these files."""
    for path in directory.iterdir():
        if path.is_file() and path.stem not in names:
            path.unlink()


def bad(report: Report) -> set[tuple[str, str]]:
    return {(result.case, result.what) for result in report.results if not result.ok}


class TestGolden:
    def test_all_agree(self, report: Report) -> None:
        assert not bad(report)
        assert report.ok
        assert report.not_compared == []

    def test_every_file_is_covered(self, report: Report, golden: Path) -> None:
        """Each kind of case, and every prompt of every file."""
        compared = {result.case for result in report.results}
        for name, part, label in (
            ("text_fp32", "ids", "text {}"),
            ("dspark_fp32", "tokens", "dspark {}"),
            ("vision_fp32", "rgb", "vision {}"),
            ("replay_fp32", "logits", "replay {} mask"),
            ("replay_fp32", "logits", "replay {} compact"),
        ):
            names = [key.rpartition(".")[0] for key in load_file(golden / f"{name}.safetensors") if key.endswith(part)]
            assert names
            assert {label.format(case) for case in names} <= compared
        assert {"formats", "engram", "image grids"} <= compared
        assert any(case.startswith("trace") for case in compared)

    def test_agreement_is_typically_1e_6(self, report: Report) -> None:
        errors = torch.tensor([result.error for result in report.results])
        assert errors.quantile(0.9) < 1e-5


class TestFaults:
    """Each damages one expected value; exactly that case must fail."""

    @pytest.mark.parametrize(
        ("file", "tensor", "case"),
        [
            ("text_fp32", "text40.logits", ("text text40", "logits")),
            ("text_fp32", "prose.features", ("text prose", "features")),
            ("trace17_fp32", "attention_out3", ("trace text17", "attention_out3")),
            ("trace17_fp32", "selected4", ("trace text17", "selected4")),
            ("engram", "hash_masked", ("engram", "hash_masked")),
            ("engram", "token_map", ("engram", "token_map")),
            ("formats", "latent_nvfp4.out", ("formats", "latent_nvfp4")),
            ("vision_fp32", "tall.patches", ("vision tall", "patches")),
            ("vision_fp32", "tall.aligned", ("vision tall", "aligned")),
            ("vision_fp32", "tall.grid", ("vision tall", "grid")),
            ("dspark_fp32", "text17.tokens", ("dspark text17", "tokens")),
            ("dspark_fp32", "text17.confidence_logits", ("dspark text17", "confidence_logits")),
        ],
    )
    @pytest.mark.slow
    def test_a_changed_value_is_found(self, copy: Path, file: str, tensor: str, case: tuple[str, str]) -> None:
        def change(tensors: dict[str, Tensor]) -> None:
            value = tensors[tensor]
            rows = slice(None) if tensor.startswith("prose") or value.dim() == 1 else slice(-1, None)
            step = 1 if not value.is_floating_point() else 2e-3 * value[rows].abs().max() + 1e-4
            value[rows] = value[rows] + step

        keep(copy, file, "text_fp32")
        golden_files.edit(copy / f"{file}.safetensors", change)
        assert bad(check_golden.check(copy)) == {case}

    def test_replay_is_checked_in_both_modes(self, copy: Path) -> None:
        keep(copy, "replay_fp32", "text_fp32")
        golden_files.edit(copy / "replay_fp32.safetensors", lambda t: t["text40_keep20.logits"].mul_(1.01))
        modes = {(f"replay text40_keep20 {mode}", "logits") for mode in ("mask", "compact")}
        assert bad(check_golden.check(copy)) == modes

    def test_a_wrong_shape_is_a_failure_with_a_note(self, copy: Path) -> None:
        keep(copy, "text_fp32")
        golden_files.edit(copy / "text_fp32.safetensors", lambda t: t.update({"text3.logits": t["text2.logits"]}))
        report = check_golden.check(copy)
        assert bad(report) == {("text text3", "logits")}
        assert [r.note for r in report.results if not r.ok] == ["shape [3, 476], expected [2, 476]"]
        assert json.loads(check_golden.as_json(report))["ok"] is False

    def test_nan_is_a_failure(self, copy: Path) -> None:
        keep(copy, "text_fp32")
        golden_files.edit(copy / "text_fp32.safetensors", lambda t: t["text3.logits"].fill_(torch.nan))
        assert bad(check_golden.check(copy)) == {("text text3", "logits")}

    def test_a_changed_weight_is_found_where_it_acts(self, copy: Path) -> None:
        """The Markov head acts in drafts only."""
        keep(copy, "text_fp32", "dspark_fp32")
        name = "mtp.1.markov_head.head.weight"
        files = json.loads((copy / "checkpoint/model.safetensors.index.json").read_text())["weight_map"]
        golden_files.edit(copy / "checkpoint" / files[name], lambda t: t[name].mul_(2))
        found = bad(check_golden.check(copy))
        assert {case.split()[0] for case, _ in found} == {"dspark"}
        assert "base_logits" not in {what for _, what in found}

    def test_wrong_grids_are_found(self, copy: Path) -> None:
        keep(copy, "image_grids")
        good = json.loads((copy / "image_grids.json").read_text())
        right = {**good, "golden": [*good["golden"], [0, 5, "an image without pixels"]]}
        wrong = {**good, "released": [[*good["released"][0][:-1], 12]], "golden": [[10, 10, "no grid"]]}
        golden_files.grids(copy, right)
        assert not bad(check_golden.check(copy))
        golden_files.grids(copy, wrong)
        assert bad(check_golden.check(copy)) == {("image grids", "released"), ("image grids", "golden")}


class TestOtherDirectories:
    def test_another_model_is_discovered(self, other: Path) -> None:
        report = check_golden.check(other)
        assert not bad(report)
        cases = {result.case for result in report.results}
        assert {f"text text{n}" for n in golden_files.LENGTHS} <= cases
        assert {"replay text30_keep7 mask", "replay text30_keep7 compact", "dspark text4", "trace text13"} <= cases
        assert not any(case.startswith(("vision", "engram", "formats", "image")) for case in cases)

    def test_without_drafts(self, tmp_path: Path) -> None:
        data = edited(tiny(**NO_ENGRAM), num_nextn_predict_layers=0, compress_ratios=[0, 2, 2, 1, 1, 1])
        data["text_config"].pop("dspark_target_layer_ids")
        golden_files.write(tmp_path, data, lengths=(4, 9))
        report = check_golden.check(tmp_path)
        assert report.ok
        assert {result.case for result in report.results} == {
            "text text4", "text text9", "replay text9_keep7 mask", "replay text9_keep7 compact",
        }  # fmt: skip

    def test_what_is_not_compared_is_said(self, copy: Path) -> None:
        keep(copy, "text_fp32", "formats")
        golden_files.edit(copy / "text_fp32.safetensors", lambda t: t.update({"text3.hidden": t["text3.logits"]}))
        shutil.copy(copy / "formats.safetensors", copy / "other.safetensors")
        report = check_golden.check(copy)
        assert report.not_compared == ["other.safetensors", "text_fp32: text3.hidden"]
        assert "not compared: text_fp32: text3.hidden" in check_golden.table(report)


class TestCommand:
    def test_a_table_and_a_json_file(self, other: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert check_golden.main([str(other), "--json", str(tmp_path / "out.json")]) == 0
        lines = capsys.readouterr().out.splitlines()
        written = json.loads((tmp_path / "out.json").read_text())
        assert lines[0].split() == ["case", "what", "error", "limit", "ok", "tie"]
        assert len(lines) == len(written["cases"]) + 2
        assert lines[-1] == f"{len(written['cases'])} of {len(written['cases'])} agree"
        assert written["ok"] is True
        assert written["not_compared"] == []
        assert set(written["cases"][0]) == {"case", "what", "error", "limit", "note", "tie", "ok"}

    def test_a_failure_exits_with_1(self, copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
        keep(copy, "formats")
        golden_files.edit(copy / "formats.safetensors", lambda t: t["window_fp8.out"].neg_())
        assert check_golden.main([str(copy)]) == 1
        assert " NO" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("break_it", "message"),
        [
            (lambda d: shutil.rmtree(d), "does not exist; it takes a directory with checkpoint/"),
            (lambda d: shutil.rmtree(d / "checkpoint"), "checkpoint: does not exist"),
            (lambda d: (d / "checkpoint/model-00002-of-00002.safetensors").unlink(), "model-00002-of-00002"),
            (lambda d: (d / "checkpoint/tokenizer.json").unlink(), "no tokenizer at"),
            (lambda d: [f.unlink() for f in d.glob("*_*.*")] + [(d / f"{n}.safetensors").unlink() for n in
             ("engram", "formats")], "holds a checkpoint but no golden data"),
            (lambda d: (d / "text_fp32.safetensors").unlink(), "holds no tensor text17.ids"),
        ],
        ids=["no directory", "no checkpoint", "half a checkpoint", "no tokenizer", "no data", "no texts"],
    )  # fmt: skip
    def test_what_cannot_be_checked_is_one_error(
        self, copy: Path, capsys: pytest.CaptureFixture[str], break_it: object, message: str
    ) -> None:
        break_it(copy)  # type: ignore[operator]
        assert check_golden.main([str(copy)]) == 1
        found = capsys.readouterr()
        assert found.err.startswith("error: ")
        assert message in found.err
        assert len(found.err.splitlines()) == 1

    def test_runs_as_a_script(self, tmp_path: Path) -> None:
        command = [sys.executable, str(SCRIPTS / "check_golden.py"), str(tmp_path / "absent")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith(f"error: {tmp_path / 'absent'}: does not exist")


class TestRowErrors:
    def test_floats_relative_to_the_expected_row(self) -> None:
        found = row_errors(torch.tensor([[3.0, 4], [0, 0], [1, 0]]), torch.tensor([[3.0, 5], [0, 0], [1, 1e-3]]))
        assert found.tolist() == pytest.approx([1 / 34**0.5, 0, 1e-3], rel=1e-5)

    def test_integers_must_be_identical(self) -> None:
        wide = torch.zeros(2, 5000, dtype=torch.int64)
        other = wide.clone()
        other[1, 7] = 1
        assert row_errors(other, wide).tolist() == [0, 1]

    def test_other_shapes_are_infinitely_wrong(self) -> None:
        assert row_errors(torch.zeros(2, 3), torch.zeros(2, 4)).tolist() == [torch.inf, torch.inf]
