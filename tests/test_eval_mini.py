"""eval/mini.py and train/calibrate.py as a user runs them, on a model that knows nothing."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tiny

from deepinfer import LLM, ConfigError
from deepinfer.config.model import ModelConfig
from deepinfer.speculative.calibration import FILE, Calibration, Observations, errors
from eval import mini
from eval.questions import COUNTS, Question
from eval.replies import Reply
from train import calibrate

ROOT = Path(__file__).parents[1]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return tiny.write(tmp_path / "checkpoint")


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that knows nothing does not end its replies; a few tokens of them do."""
    monkeypatch.setattr(Question, "most_tokens", property(lambda question: 24))


def measure(*arguments: str | Path) -> int:
    return mini.main(["--quiet", *map(str, arguments)])


def command(*arguments: str | Path, directory: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    line = [sys.executable, str(ROOT / "eval" / "mini.py"), *map(str, arguments)]
    return subprocess.run(
        line, capture_output=True, text=True, env=environment, cwd=directory, timeout=120, check=False
    )


def test_it_runs_from_anywhere_and_says_what_it_missed(checkpoint: Path, tmp_path: Path) -> None:
    result = command("--model", checkpoint, "--tasks", "image", "--quick", "--samples", "2", directory=tmp_path)
    assert result.returncode == 1, result.stderr
    assert re.search(r"in an image \| 0.0% \| ≥ 90.0% \| MISSED \| 0 of 2", result.stdout)
    assert "image: 2 exercises" in result.stderr
    assert "drafting, image" in result.stderr  # progress bars


def test_a_text_that_is_read_badly_is_missed(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mini, "heldout_documents", lambda: ["A short text."])
    assert mini.main(["--model", str(checkpoint), "--tasks", "english", "--quick"]) == 1
    shown = capsys.readouterr()
    assert re.search(r"bits per byte \| \d+\.\d{3} \| ≤ 2.000 \| MISSED", shown.out)
    assert "English text" in shown.err  # progress bars


def test_help_names_every_option_and_variable(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        mini.main(["--help"])
    out = capsys.readouterr().out
    options = ("--model", "--samples", "--seed", "--tasks", "--quick", "--json", "--quiet")
    for word in (*options, "DEEPINFER_HF_MODEL_DIR", *COUNTS):
        assert word in out


def test_json_holds_every_row(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "table.json"
    arguments = ("--model", checkpoint, "--tasks", "image", "json", "--samples", "3", "--seed", "5", "--json", out)
    assert measure(*arguments) == 1
    record = json.loads(out.read_text())
    rows = {row["key"]: row for row in record["rows"]}
    assert list(rows) == ["json", "image", "accepted_length", "calibration_error", "agreement"]
    assert rows["image"]["note"] == "0 of 3"
    assert (record["seed"], record["passed"], record["model"]) == (5, False, str(checkpoint))
    assert 1 <= rows["accepted_length"]["value"] < 2.5
    printed = capsys.readouterr().out
    assert all(row["name"] in printed for row in record["rows"])


def test_quick_takes_fewer_exercises_and_a_word_still_counts() -> None:
    def counts(*arguments: str) -> dict[str, int]:
        return mini.count_samples(mini.parse_arguments(arguments))

    assert counts() == COUNTS
    assert all(few < COUNTS[task] for task, few in counts("--quick").items())
    assert counts("--quick", "--samples", "7", "--tasks", "json", "english") == {"json": 7}


def test_bounds_that_are_kept_end_well(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eval.rows.BITS_PER_BYTE", 50.0)
    monkeypatch.setattr(mini, "heldout_documents", lambda: ["A short text."])
    assert measure("--model", checkpoint, "--tasks", "english", "--quick") == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "/nowhere"], "/nowhere"),
        (["--json", "/nowhere/table.json"], "--json takes a file in a directory that exists"),
        (["--tasks", "passkey"], "leave the task passkey out"),
    ],
    ids=["no model", "no place for the table", "a context too short"],
)
def test_what_cannot_be_done_gets_one_line(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert measure("--model", checkpoint, *arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize("arguments", [["--samples", "0"], ["--samples", "x"], ["--tasks", "chess"], ["--tasks"]])
def test_bad_options_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        mini.main(arguments)


def test_a_broken_calibration_is_named(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (checkpoint / FILE).write_text("{}")
    assert measure("--model", checkpoint, "--tasks", "add2") == 2
    assert f"{checkpoint / FILE}" in capsys.readouterr().err


class TestCalibrate:
    arguments = ("--samples", "2", "--tasks", "json", "image")

    def test_it_writes_what_it_prints(self, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert calibrate.main(["--model", str(checkpoint), *self.arguments]) == 0
        out = capsys.readouterr().out
        block = ModelConfig.from_file(checkpoint / "config.json").dspark_block_size
        found = Calibration.load(checkpoint, block)
        assert found.samples > 0
        assert "json, image" in found.dataset
        for temperature in found.temperatures:
            assert f"{temperature:.3f}" in out
        assert f"{found.ece_before:.4f}  {found.ece_after:9.4f}" in out
        assert str(checkpoint / FILE) in out

    def test_its_errors_are_those_of_its_rounds(self, checkpoint: Path) -> None:
        rounds = calibrate.collect(checkpoint, {"image": 4}, seed=4, shown=False)
        found, before, after = calibrate.fit(rounds, "some")
        seen = Observations.of(rounds)
        assert before == errors(seen, [1.0] * 5)
        assert after == errors(seen, found.temperatures)
        assert (found.samples, found.dataset) == (len(rounds), "some")
        assert found.ece_after == after.ece
        assert after.ece_by_position[0] <= before.ece_by_position[0]

    def test_the_table_says_calibrated_afterwards(self, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
        quick = ("--model", checkpoint, "--tasks", "image", "--samples", "2")
        measure(*quick)
        assert "confidence, NOT calibrated" in capsys.readouterr().out
        calibrate.main(["--model", str(checkpoint), *self.arguments])
        measure(*quick)
        assert "confidence, calibrated" in capsys.readouterr().out

    def test_exercises_are_not_those_of_the_table(self, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        seen: dict[str, list[tuple[int, ...]]] = {}
        for name, module in (("mini", mini), ("calibrate", calibrate)):

            def watched(llm: LLM, questions: list[Question], shown: bool = True, name: str = name) -> list[Reply]:
                seen[name] = [question.prompt for question in questions]
                return [Reply(question, question.expected, "", False) for question in questions]

            monkeypatch.setattr(module, "answer", watched)
        measure("--model", checkpoint, "--tasks", "add2", "--samples", "4", "--seed", "0")
        calibrate.main(["--model", str(checkpoint), "--tasks", "add2", "--samples", "4", "--seed", "0"])
        assert len(seen["mini"]) == len(seen["calibrate"]) == 4
        assert not set(seen["mini"]) & set(seen["calibrate"])

    def test_an_engine_without_drafts_is_named(self, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("DEEPINFER_USE_NEXTN_DECODE", "0")
        with pytest.raises(ConfigError, match="nothing is drafted"):
            calibrate.collect(checkpoint, {"json": 1}, seed=0)

    def test_without_exercises_there_is_nothing_to_fit(self, checkpoint: Path) -> None:
        with pytest.raises(ConfigError, match="take more exercises"):
            calibrate.collect(checkpoint, {"json": 0}, seed=0, shown=False)

    def test_a_missing_model_gets_one_line(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert calibrate.main(["--model", "/nowhere"]) == 2
        assert capsys.readouterr().err.startswith("error: ")
