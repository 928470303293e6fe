"""eval/precision.py: what reduced precision loses is seen, and a whole run on a model that knows nothing."""

from pathlib import Path

import pytest
import tiny

from eval import precision
from eval.questions import Question

NAME = precision.PERPLEXITY_NAME


@pytest.mark.parametrize(
    ("task", "perplexity", "kept"),
    [(0.5, 20.0, True), (0.49, 20.2, True), (0.9, 10.0, True), (0.48, 20.0, False), (0.5, 20.3, False)],
)
def test_limits(task: float, perplexity: float, kept: bool) -> None:
    table, verdict = precision.show({"FP32": {"a": 0.5, NAME: 20.0}, "other": {"a": task, NAME: perplexity}})
    assert verdict is kept
    assert ("LOST" in table) is not kept


def test_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(Question, "most_tokens", property(lambda question: 4))
    monkeypatch.setattr(precision, "heldout_documents", lambda: ["Some text.", "More of it, longer than a piece."])
    monkeypatch.setattr(precision, "_PIECE", 5)
    checkpoint = tiny.write(tmp_path / "checkpoint")
    assert precision.main(["--model", str(checkpoint), "--samples", "2", "--tasks", "add2"]) in (0, 1)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| | FP32 | BF16 | quantised |"
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| add2", f"| {NAME}"]
    assert "+0.00%" in lines[3]


def test_no_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert precision.main(["--model", str(tmp_path)]) == 2
    assert "error: " in capsys.readouterr().err
