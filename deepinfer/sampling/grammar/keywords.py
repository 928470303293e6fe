"""What JSON Schema's keywords are, as far as a grammar is concerned."""

from collections.abc import Mapping
from typing import Any

from deepinfer.core.errors import RequestError

ANNOTATIONS = frozenset(
    (
        *("title", "description", "default", "example", "examples", "deprecated", "readOnly", "writeOnly"),
        *("$comment", "$schema", "$id", "$anchor", "$defs", "definitions", "$vocabulary"),
        *("contentEncoding", "contentMediaType", "contentSchema"),
    )
)
"""Say nothing about which values are valid."""

FAMILIES = {
    "string": frozenset(("minLength", "maxLength", "pattern", "format")),
    "number": frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")),
    "array": frozenset(
        (
            *("items", "prefixItems", "additionalItems", "unevaluatedItems", "minItems", "maxItems"),
            *("uniqueItems", "contains", "minContains", "maxContains"),
        )
    ),
    "object": frozenset(
        (
            *("properties", "required", "additionalProperties", "unevaluatedProperties", "patternProperties"),
            *("propertyNames", "minProperties", "maxProperties"),
            *("dependentRequired", "dependentSchemas", "dependencies"),
        )
    ),
}
"""Keywords that only say something about values of one type."""

TYPES = ("string", "number", "integer", "boolean", "null", "array", "object")
COMBINERS = ("anyOf", "oneOf", "allOf")
VALUES = ("enum", "const")
_KNOWN = frozenset(("type", "$ref", *COMBINERS, *VALUES)).union(ANNOTATIONS, *FAMILIES.values())


def assertions(schema: Mapping[str, Any]) -> list[str]:
    """The keywords of a schema that may say something about its values, unknown ones included."""
    return [key for key in schema if key not in ANNOTATIONS and not key.startswith("x-")]


def unknown(schema: Mapping[str, Any]) -> list[str]:
    """Assertions that no grammar here ever enforces: not, if, $dynamicRef, and whatever is no keyword at all."""
    idle = () if "if" in schema else ("then", "else")
    return [key for key in assertions(schema) if key not in _KNOWN and key not in idle]


def types_of(schema: Mapping[str, Any], path: str) -> list[str]:
    """The types of a schema's values: those it names, else those that its keywords are about, else all."""
    given = schema.get("type")
    if given is None:
        implied = [family for family, words in FAMILIES.items() if not words.isdisjoint(schema)]
        return implied or list(TYPES)
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, list) or not names or not all(name in TYPES for name in names):
        raise wrong(f"{path}.type", given, f"one of {', '.join(TYPES)}, or a list of these")
    return list(dict.fromkeys(names))


def is_type(value: Any, name: str) -> bool:
    """Whether a JSON value has a type of JSON Schema."""
    if isinstance(value, bool) or value is None:
        return name == ("null" if value is None else "boolean")
    if isinstance(value, int | float):
        return name == "number" or (name == "integer" and value == int(value))
    return name == ("string" if isinstance(value, str) else "array" if isinstance(value, list) else "object")


def at(path: str, key: str | int) -> str:
    """The JSON path of a member."""
    if isinstance(key, int):
        return f"{path}[{key}]"
    return f"{path}.{key}" if key.replace("$", "").replace("-", "").isidentifier() else f"{path}[{key!r}]"


def count(schema: Mapping[str, Any], key: str, path: str) -> int | None:
    """A keyword that takes a number of things, if it is there."""
    value = schema.get(key)
    if value is not None and not (_is_number(value) and value >= 0 and value == int(value)):
        raise wrong(at(path, key), value, "a whole number >= 0")
    return None if value is None else int(value)


def number(schema: Mapping[str, Any], key: str, path: str) -> int | float | None:
    """A keyword that takes a number, if it is there."""
    value = schema.get(key)
    if value is not None and not _is_number(value):
        raise wrong(at(path, key), value, "a number")
    return value


def kind(schema: Mapping[str, Any], key: str, path: str, takes: type, noun: str) -> Any:
    """A keyword that takes a list, an object or text, if it is there."""
    value = schema.get(key)
    if value is not None and not isinstance(value, takes):
        raise wrong(at(path, key), value, noun)
    return value


def wrong(path: str, value: Any, takes: str) -> RequestError:
    """The error of a schema that is none."""
    return RequestError(f"json_schema: {path} is {value!r:.60}; it takes {takes}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
