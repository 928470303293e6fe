"""Questions of a benchmark as one noun, read from JSON Lines in the form in which each set is published."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import Any

from eval.harness.benchmarks import Kind
from eval.harness.errors import EvalError
from eval.harness.extraction import LETTERS, integer

_GPQA_WRONG = tuple(f"Incorrect Answer {number}" for number in (1, 2, 3))
FORMS = {
    "integer": '{"id" or "problem_idx", "problem" or "question", "answer": an integer}',
    "choice": '{"id", "question", "choices": [texts], "answer": a letter} or {"Record ID", "Question", '
    '"Correct Answer", "Incorrect Answer 1" to "3"}',
    "free": '{"id", "question", "answer", optional "image": a data URL}',
}


@dataclass(frozen=True)
class Problem:
    """One question.

    answer: the integer in digits, the letter of the right choice, or text.
    choices: texts of the choices A, B, ..., empty where there are none. image: a data URL, or None.
    """

    id: str
    kind: Kind
    question: str
    answer: str
    choices: tuple[str, ...] = ()
    image: str | None = None

    def as_json(self) -> dict[str, Any]:
        """All but the picture, of which only that there is one: enough to judge answers by."""
        return asdict(self) | {"choices": list(self.choices), "image": self.image is not None}


def read_problem(fields: object, kind: Kind, where: str) -> Problem:
    """Make a problem of one record of a set; EvalError that begins with `where` if it lacks something."""
    if not isinstance(fields, Mapping):
        raise EvalError(f"{where} is no object; it takes {FORMS[kind]}")
    try:
        return _READERS[kind](fields)
    except KeyError as error:
        raise EvalError(f"{where} has no {error.args[0]!r}; it takes {FORMS[kind]}") from None
    except ValueError as error:
        raise EvalError(f"{where}: {error}; it takes {FORMS[kind]}") from None


def _text(fields: Mapping[str, Any], *names: str) -> str:
    """The first of `names` that is there, as text; numbers are written out."""
    name = next((name for name in names if name in fields), None)
    if name is None:
        raise KeyError(names[0])
    value = fields[name]
    if isinstance(value, bool) or not isinstance(value, str | int) or not str(value).strip():
        raise ValueError(f"{name} is {json.dumps(value)[:60]}")
    return str(value).strip()


def _integer_problem(fields: Mapping[str, Any]) -> Problem:
    name, question = _text(fields, "id", "problem_idx"), _text(fields, "problem", "question")
    answer = integer(_text(fields, "answer"))
    if answer is None:
        raise ValueError(f"answer is {fields['answer']!r}")
    return Problem(name, "integer", question, str(answer))


def _choice_problem(fields: Mapping[str, Any]) -> Problem:
    if "Correct Answer" in fields:
        return _shuffled(fields)
    name, question, letter = (_text(fields, key) for key in ("id", "question", "answer"))
    choices = fields["choices"]
    if not isinstance(choices, list) or not 2 <= len(choices) <= len(LETTERS):
        raise ValueError("choices is no list of 2 to 26 texts")
    if letter not in LETTERS[: len(choices)]:
        raise ValueError(f"answer is {letter!r}")
    return Problem(name, "choice", question, letter, tuple(map(str, choices)))


def _shuffled(fields: Mapping[str, Any]) -> Problem:
    """A record in GPQA's own columns: the right choice first. The id alone decides the order, the same in every run."""
    name = _text(fields, "Record ID")
    right = _text(fields, "Correct Answer")
    choices = [right, *(_text(fields, column) for column in _GPQA_WRONG)]
    order = sorted(range(len(choices)), key=lambda place: blake2b(f"{name}/{place}".encode()).digest())
    letter = LETTERS[order.index(0)]
    return Problem(name, "choice", _text(fields, "Question"), letter, tuple(choices[place] for place in order))


def _free_problem(fields: Mapping[str, Any]) -> Problem:
    image = fields.get("image") or None
    if image is not None and not (isinstance(image, str) and image.startswith("data:image/")):
        raise ValueError("image is no data URL")
    name, question, answer = (_text(fields, key) for key in ("id", "question", "answer"))
    return Problem(name, "free", question, answer, image=image)


_READERS: dict[Kind, Callable[[Mapping[str, Any]], Problem]] = {
    "integer": _integer_problem,
    "choice": _choice_problem,
    "free": _free_problem,
}
