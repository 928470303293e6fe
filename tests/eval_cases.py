"""What the tests of the evaluation share: problems and rollouts without a model."""

from pathlib import Path

from eval.harness.benchmarks import Kind
from eval.harness.problems import Problem
from eval.harness.rollouts import Rollout
from eval.harness.verdicts import Case


def problem(name: str = "q", kind: Kind = "integer", answer: str = "42") -> Problem:
    choices = ("red", "green", "blue", "black") if kind == "choice" else ()
    return Problem(name, kind, f"What is {name}?", answer, choices)


def rollout(question: str = "q", sample: int = 0, text: str = "\\boxed{42}", **fields: object) -> Rollout:
    values: dict[str, object] = {
        "question": question,
        "sample": sample,
        "seed": 1,
        "prompt_hash": "ab",
        "text": text,
        "reasoning": None,
        "finish_reason": "stop",
        "prompt_tokens": 5,
        "completion_tokens": 10,
        "error": None,
    }
    return Rollout(**{**values, **fields})  # type: ignore[arg-type]


def case(text: str, answer: str = "42", kind: Kind = "integer", question: str = "q", sample: int = 0) -> Case:
    return Case(problem(question, kind, answer), rollout(question, sample, text))


def lines(path: Path) -> list[str]:
    return path.read_text("utf-8").splitlines()
