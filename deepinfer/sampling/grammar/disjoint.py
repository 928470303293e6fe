"""Whether two schemas surely share no value: then "exactly one of them" is "one of them"."""

import json
from collections.abc import Callable, Mapping
from itertools import combinations
from typing import Any

from deepinfer.sampling.grammar.keywords import COMBINERS, TYPES, is_type

Resolve = Callable[[Any], Any]
"""Follows the `$ref` of a schema, if it is nothing but that."""


def all_disjoint(schemas: list[Any], resolve: Resolve) -> bool:
    """Whether any two of the schemas are known to share no value: by type, listed values, or a required property."""
    found = [resolve(schema) for schema in schemas]
    return all(_disjoint(one, other, resolve) for one, other in combinations(found, 2))


def shares_value(values: list[Any], value: Any) -> bool:
    """Whether a JSON value is in a list."""
    return _key(value) in map(_key, values)


def _disjoint(one: Any, other: Any, resolve: Resolve) -> bool:
    if one is False or other is False:
        return True
    if not isinstance(one, Mapping) or not isinstance(other, Mapping):
        return False
    a, b = _values(one), _values(other)
    if a is not None and b is not None:
        return not {_key(value) for value in a} & {_key(value) for value in b}
    if a is not None:
        return not any(is_type(value, name) for value in a for name in _types(other))
    if b is not None:
        return not any(is_type(value, name) for value in b for name in _types(one))
    types, others = _numeric(_types(one)), _numeric(_types(other))
    if not types & others:
        return True
    return types == others == {"object"} and _discriminated(one, other, resolve)


def _discriminated(one: Mapping[str, Any], other: Mapping[str, Any], resolve: Resolve) -> bool:
    """Whether both require a property that can have no common value."""
    shared = set(_required(one)) & set(_required(other))
    mine, theirs = one.get("properties"), other.get("properties")
    if not isinstance(mine, Mapping) or not isinstance(theirs, Mapping):
        return False
    return any(
        name in mine and name in theirs and _disjoint(resolve(mine[name]), resolve(theirs[name]), resolve)
        for name in shared
    )


def _required(schema: Mapping[str, Any]) -> list[str]:
    names = schema.get("required", [])
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _values(schema: Mapping[str, Any]) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _types(schema: Mapping[str, Any]) -> set[str]:
    """The types that a schema names; all, where it names none itself."""
    given = schema.get("type")
    if given is None or "$ref" in schema or any(key in schema for key in COMBINERS):
        return set(TYPES) if given is None else {given} if isinstance(given, str) else set(given)
    return {given} if isinstance(given, str) else set(given)


def _numeric(types: set[str]) -> set[str]:
    return {"number" if name == "integer" else name for name in types}


def _key(value: Any) -> str:
    """Equal for equal JSON values: 1 and 1.0 are one number, true is none."""
    if isinstance(value, float) and value == int(value):
        value = int(value)
    if isinstance(value, list):
        return "[" + ",".join(map(_key, value)) + "]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{json.dumps(key)}:{_key(value[key])}" for key in sorted(value)) + "}"
    return json.dumps(value)
