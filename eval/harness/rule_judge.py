"""Judges by rule: the integer in the last box, the letter after the last `ANSWER:`."""

from collections.abc import Sequence

from eval.harness.errors import EvalError
from eval.harness.extraction import answer_letter, boxed_integer
from eval.harness.problems import Problem
from eval.harness.verdicts import Case, Verdict


def judge_by_rule(cases: Sequence[Case]) -> list[Verdict]:
    """One verdict a case; an answer that the rule does not find is wrong. EvalError for free answers."""
    return [_verdict(case) for case in cases]


def _verdict(case: Case) -> Verdict:
    found = extract(case.problem, case.rollout.text)
    note = None if found is not None else "no answer found"
    return Verdict.of(case.rollout, found == case.problem.answer, found, note)


def extract(problem: Problem, text: str) -> str | None:
    """The answer that a text gives to a question with a rule, spelled as the question's own is."""
    if problem.kind == "integer":
        value = boxed_integer(text)
        return None if value is None else str(value)
    if problem.kind == "choice":
        return answer_letter(text, len(problem.choices))
    raise EvalError("no rule tells whether a free answer is right; score it with --judge llm, or math for formulas")
