"""How a question is put to the model."""

from typing import Any, Literal

from eval.harness.extraction import LETTERS
from eval.harness.problems import Problem

Form = Literal["full", "bare"]
FORMS = ("full", "bare")
INSTRUCTIONS = {
    "integer": "Work through the problem step by step. The answer is an integer. Put it, and nothing else, "
    "in \\boxed{} at the end.",
    "choice": "Work through the question step by step. End with a line of its own that reads ANSWER: and then the "
    "letter of the right choice alone.",
    "free": "Work through the question step by step. End with the final answer on a line of its own that begins with "
    "ANSWER:",
}


def make_messages(problem: Problem, form: Form) -> list[dict[str, Any]]:
    """The conversation that asks a question.

    "full": question, choices and what the answer has to look like. "bare": the question alone, for sets whose
    questions say all that the model can follow, as the generated set's do.
    """
    text = problem.question if form == "bare" else _full(problem)
    if problem.image is None:
        return [{"role": "user", "content": text}]
    picture = {"type": "image_url", "image_url": {"url": problem.image}}
    return [{"role": "user", "content": [picture, {"type": "text", "text": text}]}]


def _full(problem: Problem) -> str:
    parts = [problem.question]
    if problem.choices:
        parts.append(list_choices(problem))
    return "\n\n".join([*parts, INSTRUCTIONS[problem.kind]])


def list_choices(problem: Problem) -> str:
    """The choices, a line each, with their letters."""
    return "\n".join(f"{letter}) {text}" for letter, text in zip(LETTERS, problem.choices, strict=False))
