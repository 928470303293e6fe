"""Judges mathematical answers by their meaning, with the package math-verify: 1/2 is 0.5."""

import re
from collections.abc import Sequence
from typing import Any

from eval.harness.errors import EvalError
from eval.harness.extraction import NAMED, boxes
from eval.harness.verdicts import Case, Verdict

_WORD = re.compile(r"(?<![\\A-Za-z])(?!(?:sin|cos|tan|cot|sec|csc|log|exp|max|min|gcd|lcm|det|mod)\b)[A-Za-z]{3,}")


def judge_by_math(cases: Sequence[Case]) -> list[Verdict]:
    """One verdict a case; without one where the right answer is no mathematical expression.

    EvalError for questions with choices, and where math-verify is not installed. Runs in the main thread: the
    package's time limit (5 s an answer) is a signal.
    """
    try:
        import math_verify
    except ImportError:
        raise EvalError("--judge math needs math-verify; install it: pip install 'deepinfer[eval]'") from None
    return [_verdict(case, math_verify) for case in cases]


def _verdict(case: Case, math_verify: Any) -> Verdict:
    if case.problem.kind == "choice":
        raise EvalError("a letter is no mathematical answer; score questions with choices by --judge rule or llm")
    gold = _parse(case.problem.answer, math_verify)
    if not gold:
        return Verdict.of(case.rollout, None, note="the right answer is no mathematical expression")
    answer = final_answer(case.rollout.text)
    found = math_verify.parse(answer)
    extracted = str(found[-1]) if found else None
    return Verdict.of(case.rollout, bool(math_verify.verify(gold, found)), extracted, None if found else "no answer")


def _parse(answer: str, math_verify: Any) -> list[Any]:
    """What an answer means; nothing for one in words, which would be read as a product of letters."""
    bare = answer.strip().strip("$")
    if _WORD.search(re.sub(r"\\[A-Za-z]+", " ", bare)):
        return []
    parsed: list[Any] = math_verify.parse(f"${bare}$")
    return parsed


def final_answer(text: str) -> str:
    """The part of a text that gives its answer: the last box, else what follows the last `ANSWER:`, else all of it."""
    boxed = list(boxes(text))
    if boxed:
        return f"${boxed[-1]}$"
    named = list(NAMED.finditer(text))
    return text[named[-1].end() :] if named else text
