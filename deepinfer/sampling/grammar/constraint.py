"""What a request's output is held to: checked, translated, ready to be compiled."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from deepinfer.core.errors import RequestError
from deepinfer.sampling.grammar.regex import grammar
from deepinfer.sampling.grammar.schema import Translation, translate
from deepinfer.sampling.grammar.spelling import MOST_IN_EBNF
from deepinfer.sampling.grammar.tools import tool_calls

LONGEST_SOURCE = 1 << 20
"""Characters of a regex, schema or grammar; what it takes to compile grows with them."""

_REPETITION = re.compile(
    r""""(?:\\.|[^"\\\n])*"|\[(?:\\.|[^\]\\\n])*\]|\#[^\n]*|\{\s*(\d{1,18})\s*(?:,\s*(\d{0,18})\s*)?\}""", re.ASCII
)
"""A string, a class or a comment, in which braces say nothing, or a repetition with its counts."""


@dataclass(frozen=True)
class Constraint:
    """A grammar.

    source: what it was made of, for messages. ebnf: as xgrammar takes it.
    markup: it uses the DSML token. unenforced: JSON paths of what it does not enforce.
    """

    source: str
    ebnf: str
    markup: bool = False
    unenforced: tuple[str, ...] = ()


def structured_output(so_args: Mapping[str, Any]) -> Constraint:
    """The constraint of checked `SamplingParams.so_args`.

    RequestError for what is no regex, schema or grammar, and, unless `partial`, for a schema that says more than a
    grammar enforces.
    """
    kind = next(key for key in ("regex", "json_schema", "ebnf") if key in so_args)
    text = so_args[kind] if kind != "json_schema" else _schema_text(so_args[kind])
    found = _constraint(kind, text)
    if found.unenforced and not so_args.get("partial", False):
        raise RequestError(
            f"json_schema: a grammar does not enforce {', '.join(found.unenforced)}; leave this out, or pass "
            '"partial": True beside json_schema to have the rest enforced'
        )
    return found


def declared_tools(tools: Sequence[Mapping[str, Any]], markup: int, open_block: bool) -> Constraint:
    """The constraint of replies that may call tools; see `tool_calls`."""
    return _tools_constraint(_json_text(list(tools), "tools"), markup, open_block)


@lru_cache(maxsize=256)
def _constraint(kind: str, text: str) -> Constraint:
    _check_length(kind, text)
    if kind == "regex":
        return Constraint("so_args['regex']", grammar(text))
    if kind == "ebnf":
        _check_repetitions(text)
        return Constraint("so_args['ebnf']", text)
    return _of("so_args['json_schema']", translate(json.loads(text)))


@lru_cache(maxsize=256)
def _tools_constraint(text: str, markup: int, open_block: bool) -> Constraint:
    _check_length("tools", text)
    return _of("tools", tool_calls(json.loads(text), markup, open_block=open_block), markup=True)


def _of(source: str, translation: Translation, markup: bool = False) -> Constraint:
    return Constraint(source, translation.ebnf, markup, translation.unenforced)


def _schema_text(schema: Any) -> str:
    """A schema as JSON text, its keys in the order they were given in."""
    if not isinstance(schema, str):
        return _json_text(schema, "json_schema")
    try:
        return _json_text(json.loads(schema), "json_schema")
    except (ValueError, RecursionError) as error:
        raise RequestError(f"json_schema is text, but no JSON: {error}") from error


def _json_text(value: Any, name: str) -> str:
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{name} cannot be written as JSON: {error}") from error


def _check_repetitions(ebnf: str) -> None:
    """Beyond the limit xgrammar's masks allow tokens that it then does not take."""
    for found in _REPETITION.finditer(ebnf):
        for count in (found[1], found[2]):
            if count and int(count) > MOST_IN_EBNF:
                raise RequestError(
                    f"so_args['ebnf'] repeats something {found[0]}; a grammar takes counts up to {MOST_IN_EBNF}: write "
                    "more of them as repetitions of a rule that repeats, or take a regex"
                )


def _check_length(kind: str, text: str) -> None:
    if len(text) > LONGEST_SOURCE:
        raise RequestError(f"{kind} has {len(text)} characters; it takes at most {LONGEST_SOURCE}")
