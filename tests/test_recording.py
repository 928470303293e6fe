"""Rounds of an engine as data for calibration, and the command that fits it."""

from dataclasses import replace
from pathlib import Path

import pytest
from llm_tools import texts

from deepinfer import LLM, ConfigError, SamplingParams
from deepinfer.cli.main import main
from deepinfer.core.plan import Span
from deepinfer.speculative.calibration import FILE, Calibration
from deepinfer.speculative.recording import Outcome, RoundLog, round_of

EOS = 1


def span(drafts: int) -> Span:
    return Span(0, 0, 10, 1 + drafts, None, 0, 0, 0, 0, True)


@pytest.mark.parametrize(
    ("drafts", "made", "accepted", "judged", "emitted"),
    [
        (3, [5, 6], 1, 3, 2),
        (3, [5, 6, 7, 8], 3, 3, 4),
        (3, [5], 0, 3, 1),
        (3, [5, EOS, 7, 8], 2, 2, 2),  # of what follows the end nothing is known
        (3, [5, EOS], 1, 2, 2),  # the target's own end, in place of a draft
        (2, [5, 6, EOS], 2, 2, 3),
    ],
)
def test_a_round(drafts: int, made: list[int], accepted: int, judged: int, emitted: int) -> None:
    found = round_of(span(drafts), made, [0.5] * 5, EOS)
    assert (found.position, found.accepted, found.judged, found.emitted) == (10, accepted, judged, emitted)
    assert found.confidence == (0.5,) * 5


def test_only_rounds_that_gave_tokens_count() -> None:
    """Not those of requests that had ended, of failed steps, of prompts; without drafts there is nothing to keep."""
    log = RoundLog(EOS)
    log.kept = []
    other, prompt = replace(span(3), request_id=1), replace(span(0), request_id=2, token_ids=(5,))
    log.ran(0, [span(3), other, prompt], lambda: Outcome([[5, 6], [7], [8]], [[0.5] * 5] * 3, [[0.4] * 5] * 3))
    log.ran(1, [span(0)], lambda: Outcome([[5]], [[]], [[]]))
    log.landed(0, {0, 2})
    log.landed(1, {0})
    log.landed(2, {0})
    assert (log.statistics.rounds, log.statistics.tokens) == (2, 3)
    assert (log.statistics.verified, log.statistics.accepted) == ([1, 1, 1], [1, 0, 0])
    assert [one.accepted for one in log.kept] == [1]


def test_an_engine_records_its_rounds(tiny_checkpoint: Path) -> None:
    llm = LLM(tiny_checkpoint)
    rounds = llm.record_rounds()
    llm.generate(texts(3, 4, 5, 20), SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), use_tqdm=False)
    assert len(rounds) > 8
    assert all(1 <= one.judged <= 5 and len(one.confidence) == 5 for one in rounds)
    with pytest.raises(ConfigError, match="nothing is drafted"):
        LLM(tiny_checkpoint, nextn=0).record_rounds()


def test_the_command_fits_and_keeps(tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    for path in tiny_checkpoint.iterdir():
        (directory / path.name).symlink_to(path)
    command = ["calibrate", "--model", str(directory), "--max-tokens", "12"]
    assert main([*command, "some text", "and more of it"]) == 0
    out = capsys.readouterr().out
    kept = Calibration.load(directory, 5)
    assert str(directory / FILE) in out
    assert f"{kept.samples} rounds of 2 prompts" in out
    assert kept.samples > 4
    assert main([*command[:-1], "1", "some text"]) == 2
    assert "longer replies" in capsys.readouterr().err
