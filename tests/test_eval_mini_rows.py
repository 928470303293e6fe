"""Bits per byte, rows of the table and how they are shown."""

import math
from pathlib import Path

import pytest
import torch

from deepinfer.speculative.calibration import Calibration
from deepinfer.speculative.rounds import Round
from deepinfer.text.tokenizer import Tokenizer
from eval.english import TextScore, score_text
from eval.questions import Question, heldout_documents
from eval.replies import Reply
from eval.rows import TASKS, agreement_row, draft_rows, english_row, task_row
from eval.table import Row, show
from eval.target import Replay, Target
from train.sample import Sample, user

ROOT = Path(__file__).parents[1]
DOCUMENTS = ["Two rivers meet in the valley.", "Ω ≠ ω", "x"]


@pytest.fixture(scope="module")
def target(tiny_checkpoint: Path) -> Target:
    return Target(tiny_checkpoint)


class TestEnglish:
    def test_every_token_is_predicted_once_from_its_piece(self, target: Target) -> None:
        expected = 0.0
        bos = target.config.bos_token_id
        for document in DOCUMENTS:
            ids = target.tokenizer.encode(document)
            for at, token in enumerate(ids):
                before = [bos, *ids[at - at % 7 : at]]  # pieces of seven tokens behind a beginning token
                logits = target.model(torch.tensor([before])).logits[0, -1]
                expected -= float(logits.log_softmax(-1)[token]) / math.log(2)
        score = score_text(target, DOCUMENTS, piece=8, shown=False)
        assert score.bits == pytest.approx(expected, rel=1e-3)

    def test_bytes_are_those_of_the_text(self, target: Target) -> None:
        score = score_text(target, DOCUMENTS, shown=False)
        assert score.bytes == len("".join(DOCUMENTS).encode())
        assert score.tokens == score.bytes  # this vocabulary has a token for each byte

    def test_a_uniform_model_needs_the_logarithm_of_the_vocabulary(self, tiny_checkpoint: Path) -> None:
        uniform = Target(tiny_checkpoint)
        uniform.model.head.weight.data.zero_()
        score = score_text(uniform, DOCUMENTS, shown=False)
        assert score.bits_per_byte == pytest.approx(math.log2(uniform.config.vocab_size), rel=1e-5)
        assert score.perplexity == pytest.approx(uniform.config.vocab_size, rel=1e-4)

    def test_no_byte_of_the_held_out_text_is_lost_in_tokens(self) -> None:
        tokenizer = Tokenizer.from_file(ROOT / "checkpoints" / "mini")
        for document in heldout_documents():
            assert tokenizer.decode(tokenizer.encode(document), skip_special=False) == document

    def test_units(self) -> None:
        score = TextScore(bits=300, tokens=50, bytes=200)
        assert score.bits_per_byte == 1.5
        assert score.perplexity == 2**6


class TestRows:
    @pytest.mark.parametrize(
        ("value", "at_least", "passed"),
        [(0.9, True, True), (0.8999, True, False), (0.95, True, True), (0.9, False, True), (0.9001, False, False)],
    )
    def test_a_bound_may_be_reached_but_not_missed(self, value: float, at_least: bool, passed: bool) -> None:
        row = Row("key", "name", value, 0.9, at_least)
        assert row.passed is passed
        assert ("MISSED" in show([row])) is not passed
        assert row.as_json()["passed"] is passed

    def test_nan_passes_no_bound(self) -> None:
        assert not Row("key", "name", math.nan, 0.9).passed
        assert not Row("key", "name", math.nan, 0.9, at_least=False).passed

    def test_without_a_bound_a_row_informs(self) -> None:
        row = Row("key", "name", 3.0)
        assert row.passed
        assert show([row]).splitlines()[-1] == "| name | 3.000 |  |  |  |"

    def test_accuracy(self) -> None:
        sample = Sample("add2", [user("")], False, "", 0)
        question = Question(sample, (), (), (), ())
        row = task_row("add2", [Reply(question, (), "", number < 19) for number in range(20)])
        assert (row.key, row.value, row.passed, row.note) == ("add2", 0.95, True, "19 of 20")
        assert "| 95.0% | ≥ 95.0% | pass |" in show([row])

    def test_english(self) -> None:
        assert english_row(TextScore(400, 50, 200)).passed
        assert not english_row(TextScore(401, 50, 200)).passed

    def test_the_bounds_are_those_of_the_checkpoints_specification(self) -> None:
        assert {task: bound for task, (_, bound) in TASKS.items()} == {
            "add2": 0.95,
            "add3": 0.80,
            "json": 0.90,
            "passkey": 0.90,
            "image": 0.90,
        }


def replay(*rounds: Round, tokens: int = 10, differing: int = 0) -> Replay:
    return Replay(rounds, tokens, differing)


class TestDraftRows:
    sure = Round(position=5, accepted=2, judged=2, emitted=3, confidence=(9.0, 9.0))
    doubtful = Round(position=8, accepted=0, judged=2, emitted=1, confidence=(-9.0, 9.0))

    def test_tasks_are_pooled_by_rounds(self) -> None:
        replays = {
            "add2": [replay(self.sure, self.sure), replay(self.sure)],
            "json": [replay(self.doubtful)],
            "image": [replay()],
        }
        length, error = draft_rows(replays, Calibration((1, 1)))
        assert (length.key, length.value, length.passed) == ("accepted_length", 2.5, True)
        assert "4 rounds; add2 3.00, json 1.00" in length.note
        assert (error.key, error.passed) == ("calibration_error", True)
        assert error.value < 1e-3

    def test_the_calibration_given_is_used_and_named(self) -> None:
        replays = {"add2": [replay(self.sure, self.doubtful)]}
        sharp = draft_rows(replays, Calibration((1.0, 1.0)))[1]
        blunt = draft_rows(replays, Calibration((4.0, 4.0), "some", 10))[1]
        assert "NOT calibrated" in sharp.name
        assert "NOT" not in blunt.name
        expected = 1 - 1 / (1 + math.exp(-9 / 4))  # both positions, both rounds: first and product
        assert blunt.value > expected / 2 > sharp.value
        assert f"uncalibrated {sharp.value:.3f}" in blunt.note

    def test_without_rounds_there_is_nothing_to_say(self) -> None:
        assert draft_rows({}, Calibration.identity(5)) == []
        assert draft_rows({"image": [replay()]}, Calibration.identity(5)) == []


def test_agreement_counts_tokens() -> None:
    replays = {"add2": [replay(tokens=60), replay(tokens=20)], "image": [replay(tokens=20, differing=3)]}
    row = agreement_row(replays)
    assert (row.value, row.passed, row.note) == (0.97, False, "97 of 100")
    assert agreement_row({"add2": [replay(tokens=50, differing=1)]}).passed
