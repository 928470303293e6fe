"""Pass@1 and its uncertainty, agreement, coverage; the table and the picture."""

import json
import math
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from eval_cases import rollout
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from eval.harness.picture import budget_curve, draw, question_points
from eval.harness.rollouts import Key, Rollout
from eval.harness.statistics import agreement, by_question, pass_at_1
from eval.harness.summary import show, summarise
from eval.harness.verdicts import Verdict

RECORD = {
    "benchmark": "aime",
    "samples": 2,
    "data": {"questions": 2, "extent": "whole"},
    "checkpoint": "c",
    "engine": {},
    "sampling": {},
    "seed": 0,
}
KEYS = [("a", 0), ("a", 1), ("b", 0), ("b", 1)]


def verdicts(said: Iterable[bool | None], keys: Iterable[Key] = KEYS) -> dict[Key, Verdict]:
    return {key: Verdict(*key, "hash", correct, "42") for key, correct in zip(keys, said, strict=True)}


def rollouts(keys: Iterable[Key] = KEYS, **fields: Any) -> dict[Key, Rollout]:
    return {key: rollout(*key, completion_tokens=10 * number, **fields) for number, key in enumerate(keys, 1)}


def test_pass_at_1_is_the_mean_over_questions_of_the_mean_over_samples() -> None:
    found = pass_at_1([[True, False], [True, True], [False, False], [True, True]])
    assert found.value == pytest.approx(0.625)
    shares = [0.5, 1, 0, 1]
    by_hand = math.sqrt(sum((share - 0.625) ** 2 for share in shares) / 3 / 4)
    assert found.standard_error == pytest.approx(by_hand)


@pytest.mark.parametrize("right", [0, 1, 20, 39, 40])
def test_one_sample_a_question_is_a_binomial(right: int) -> None:
    found = pass_at_1([[number < right] for number in range(40)])
    share = right / 40
    assert found.value == share
    assert found.standard_error == pytest.approx(math.sqrt(share * (1 - share) / 39))
    assert 0 <= found.low < found.high <= 1
    assert found.low <= share <= found.high


def test_all_right_is_not_all_certain() -> None:
    found = pass_at_1([[True] * 32] * 30)
    assert (found.value, found.standard_error, found.high) == (1, 0, 1)
    assert found.low == pytest.approx(0.8865, abs=1e-4), "Wilson's bound for 30 of 30"


def test_one_question_has_no_standard_error() -> None:
    found = pass_at_1([[True, False]])
    assert math.isnan(found.standard_error)
    assert 0 < found.low < 0.5 < found.high < 1


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=5), min_size=1, max_size=12))
def test_the_interval_holds_the_value_and_stays_in_range(correct: list[list[bool]]) -> None:
    found = pass_at_1(correct)
    assert 0 <= found.low <= found.value + 1e-12
    assert found.value - 1e-12 <= found.high <= 1


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    """Questions of very different difficulty, eight samples of each, 400 times."""
    source = random.Random(5)
    covered = 0
    for _ in range(400):
        chances = [source.betavariate(2, 1) for _ in range(60)]
        found = pass_at_1([[source.random() < chance for _ in range(8)] for chance in chances])
        covered += found.low <= 2 / 3 <= found.high
    assert 0.91 < covered / 400 < 0.985


def test_samples_without_a_verdict_are_left_out() -> None:
    assert by_question(verdicts([True, None, False, True])) == [[True], [False, True]]


def test_agreement_counts_what_both_judged() -> None:
    one, other = verdicts([True, True, False, None]), verdicts([True, False, False, True])
    found = agreement(one, other)
    assert (found["samples"], found["equal"], found["share"]) == (3, 2, pytest.approx(2 / 3))
    assert found["kappa"] == pytest.approx((2 / 3 - 4 / 9) / (1 - 4 / 9))
    assert found["differing"] == [{"question": "a", "sample": 1, "first": True, "second": False}]


@pytest.mark.parametrize("said", [[], [True] * 4, [False] * 4])
def test_agreement_beyond_chance_may_have_no_meaning(said: list[bool]) -> None:
    both = verdicts(said, KEYS[: len(said)])
    assert agreement(both, both)["kappa"] is None


class TestSummary:
    def summary(self, said: Iterable[bool | None], **fields: Any) -> dict[str, Any]:
        there = fields.pop("rollouts", rollouts())
        return summarise(RECORD, ["a", "b"], there, 0, {"rule": verdicts(said)}, "rule")

    def test_complete_coverage_has_a_pass_at_1(self) -> None:
        found = self.summary([True, True, True, False])
        assert (found["coverage_complete"], found["pass_at_1"]) == (True, 0.75)
        assert found["interval_95"][0] < 0.75 < found["interval_95"][1]
        assert (found["samples"], found["generated"], found["judged"], found["correct"]) == (4, 4, 4, 3)
        assert (found["completion_tokens"], found["mean_completion_tokens"], found["reference"]) == (100, 25, 0.999)
        json.dumps(found, allow_nan=False)

    @pytest.mark.parametrize(
        ("said", "there", "generated", "failed"),
        [
            ([True, True, True, None], rollouts(), 4, 0),
            ([True, True, True, True], {key: value for key, value in rollouts().items() if key != ("b", 1)}, 3, 0),
            (
                [True, True, True, True],
                {**rollouts(), ("a", 0): rollout("a", 0, finish_reason="error", error="a step failed")},
                3,
                1,
            ),
        ],
        ids=["not judged", "not generated", "failed"],
    )
    def test_any_gap_leaves_it_null(self, said: Any, there: Any, generated: int, failed: int) -> None:
        found = self.summary(said, rollouts=there)
        assert found["coverage_complete"] is False
        assert (found["pass_at_1"], found["standard_error"], found["interval_95"]) == (None, None, None)
        assert (found["generated"], found["failed"], found["judged"]) == (generated, failed, 3)
        assert "there is no Pass@1 until" in show(found)

    def test_another_set_has_another_name_and_no_reference(self) -> None:
        assert self.summary([True] * 4)["set"] == "AIME 2026"
        for extent, name in (("part", "AIME 2026 (a part)"), ("sample", "sample set in the form of AIME 2026")):
            record = {**RECORD, "data": {"questions": 2, "extent": extent}}
            found = summarise(record, ["a", "b"], rollouts(), 0, {"rule": verdicts([True] * 4)}, "rule")
            assert (found["set"], found["reference"]) == (name, None)
            assert show(found).startswith(f"{name}: 2 questions")

    def test_truncated_samples_are_counted_and_judged(self) -> None:
        found = self.summary([False] * 4, rollouts=rollouts(finish_reason="length"))
        assert (found["truncated"], found["pass_at_1"]) == (4, 0)
        assert "4 truncated" in show(found)

    def test_the_table_has_a_row_for_every_judge(self) -> None:
        modes = {"rule": verdicts([True, True, True, False]), "llm": verdicts([True, True, None, True])}
        found = summarise(RECORD, ["a", "b"], rollouts(), 0, modes, "llm")
        assert (found["judge"], found["coverage_complete"]) == ("llm", False)
        table = show(found)
        assert "| rule | 75.0% | 25.0% | " in table
        assert "| llm | - | - | - | 3 | 3 of 4 | 0 |" in table
        assert "llm and rule agree on 2 of the 3 samples that both judged (66.7%" in table


class TestPicture:
    def test_the_curve_counts_right_answers_within_a_budget(self) -> None:
        there = {
            key: rollout(*key, completion_tokens=tokens) for key, tokens in zip(KEYS, (30, 10, 10, 20), strict=True)
        }
        curve = budget_curve(there, verdicts([True, True, False, None]))
        assert curve == [(10, 1 / 3), (30, 2 / 3)]
        assert question_points(there, verdicts([True, True, False, None])) == [(20, 1.0), (10, 0.0)]

    @pytest.mark.parametrize("said", [[True, True, False, True], [None] * 4], ids=["judged", "nothing judged"])
    def test_it_is_a_picture(self, tmp_path: Path, said: list[bool | None]) -> None:
        modes = {"rule": verdicts(said), "llm": verdicts(said)}
        summary = summarise(RECORD, ["a", "b"], rollouts(), 0, modes, "rule")
        draw(tmp_path / "picture.png", summary, rollouts(), modes)
        assert Image.open(tmp_path / "picture.png").size == (1080, 660)
