#!/usr/bin/env python3
"""The three kinds of structured output: a regular expression, a JSON schema, a grammar in EBNF.

Each of them holds whatever the model would rather say. `check` tests an answer by means of its own: Python's `re`, the
`jsonschema` package, a parser made by `lark` from a grammar that was written for it.
"""

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deepinfer import LLM, RequestOutput, SamplingParams

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "job": {"enum": ["nurse", "teacher", "farmer"]},
    },
    "required": ["name", "age", "job"],
}
SUM_EBNF = """
root ::= term (" + " term){0,3}
term ::= number | "(" root ")"
number ::= [1-9] [0-9]{0,2}
"""
SUM_LARK = """
start: term (" + " term)*
term: NUMBER | "(" start ")"
NUMBER: /[1-9][0-9]{0,2}/
"""


@dataclass(frozen=True)
class Form:
    """A question and the form that its answer must have."""

    question: str
    so_args: dict[str, Any]


FORMS = (
    Form("Write a date.", {"regex": r"(19|20)\d{2}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])"}),
    Form(
        "Extract name, age and job as JSON.\nTina Davis is 29 years old and works as a nurse.", {"json_schema": PERSON}
    ),
    Form("Write a sum.", {"ebnf": SUM_EBNF}),
)


def ask(llm: LLM, forms: Sequence[Form] = FORMS, max_tokens: int = 120) -> list[RequestOutput]:
    """Answer all questions in one batch, each in its form."""
    params = [SamplingParams(temperature=0, max_tokens=max_tokens, so_args=form.so_args) for form in forms]
    conversations = [[{"role": "user", "content": form.question}] for form in forms]
    return llm.chat(conversations, params, thinking=False, use_tqdm=False)


def check(form: Form, output: RequestOutput, eos: int) -> str | None:
    """What is wrong with an answer; None if nothing is. Needs the packages jsonschema and lark."""
    import jsonschema
    import lark

    if output.error is not None:
        return str(output.error)
    if output.finish_reason != "stop" or output.token_ids[-1] != eos:
        return f"it did not end by itself ({output.finish_reason})"
    text = output.text
    try:
        if "regex" in form.so_args and re.fullmatch(form.so_args["regex"], text) is None:
            return "the regular expression does not match it"
        if "json_schema" in form.so_args:
            jsonschema.validate(json.loads(text), form.so_args["json_schema"])
        if "ebnf" in form.so_args:
            lark.Lark(SUM_LARK).parse(text)
    except (ValueError, jsonschema.ValidationError, lark.exceptions.LarkError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def main() -> int:
    llm = LLM(sys.argv[1] if len(sys.argv) > 1 else None)
    for form, output in zip(FORMS, ask(llm), strict=True):
        print(f"{next(iter(form.so_args)):12}{output.text}  ({output.finish_reason})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
