"""JSON Schema as EBNF: what is generated is always valid, and what cannot be said in a grammar is named.

The grammar may be narrower than the schema: properties come in the order of the schema, and only those it tells of
unless it allows others; a schema without a type is about the types its keywords are about.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

from deepinfer.core.errors import RequestError
from deepinfer.sampling.grammar import regex
from deepinfer.sampling.grammar.charset import ANY, literal
from deepinfer.sampling.grammar.disjoint import all_disjoint, shares_value
from deepinfer.sampling.grammar.ebnf import Rules, json_literal
from deepinfer.sampling.grammar.formats import FORMATS
from deepinfer.sampling.grammar.keywords import (
    COMBINERS,
    FAMILIES,
    TYPES,
    VALUES,
    assertions,
    at,
    count,
    is_type,
    kind,
    number,
    types_of,
    unknown,
    wrong,
)
from deepinfer.sampling.grammar.numbers import Bound, decimals, integers, multiples
from deepinfer.sampling.grammar.objects import Member, Members
from deepinfer.sampling.grammar.spelling import JsonText, PlainText, Spelling, any_of

MOST_NODES = 20_000
DEEPEST = 100
MOST_STEPS, MOST_LISTED = 100, 1000
"""Largest divisor of an unbounded integer, most multiples that are listed one by one."""


@dataclass(frozen=True)
class Translation:
    """A grammar and the JSON paths of the keywords that it does not enforce."""

    ebnf: str
    unenforced: tuple[str, ...]


def translate(schema: Any) -> Translation:
    """The grammar of a schema's values; RequestError if it is no JSON schema, or no value is valid."""
    writer = SchemaWriter(schema, Rules(), "$")
    root = writer.node(schema, "$")
    if root is None:
        raise RequestError("json_schema: no value is valid by this schema")
    return Translation(writer.rules.text(root), tuple(writer.unenforced))


class SchemaWriter:
    """Writes schemas, which are parts of `root`, as rules; `None` for a schema that no value is valid by."""

    def __init__(self, root: Any, rules: Rules, where: str) -> None:
        self.rules = rules
        self.unenforced: list[str] = []
        self._root, self._where = root, where
        self._quoted: Spelling = JsonText(rules)
        self._plain: Spelling = PlainText(rules)
        self._references: dict[str, str] = {}
        self._nodes = self._depth = 0

    def node(self, schema: Any, path: str) -> str | None:
        """EBNF of the values of a schema found at `path`."""
        self._nodes += 1
        if self._nodes > MOST_NODES or self._depth >= DEEPEST:
            raise RequestError(
                f"json_schema: {path} is beyond {MOST_NODES} subschemas or {DEEPEST} levels; it takes a smaller schema"
            )
        self._depth += 1
        try:
            return self._node(schema, path)
        finally:
            self._depth -= 1

    def string(self, schema: Mapping[str, Any], path: str, *, raw: bool = False) -> str | None:
        """Strings in quotes, or (`raw`) the bare text."""
        quote = "" if raw else '"\\""'
        spelling = self._plain if raw else self._quoted
        low, high = count(schema, "minLength", path) or 0, count(schema, "maxLength", path)
        body = self._shaped(schema, path, spelling)
        if body is not None:
            for key in ("minLength", "maxLength"):
                if schema.get(key):
                    self.skip(path, key)
        elif high is not None and low > high:
            return None
        elif not low and high is None and not raw:
            return self.rules.shared("string")
        else:
            body = spelling.many(ANY, low, high)
        return body if raw else self.rules.rule("text", f"{quote} {body} {quote}")

    def _node(self, schema: Any, path: str) -> str | None:
        if isinstance(schema, bool):
            return self.rules.shared("value") if schema else None
        if not isinstance(schema, Mapping):
            raise wrong(path, schema, "an object, true or false")
        for key in unknown(schema):
            self.skip(path, key)
        if "$ref" in schema:
            self._only(schema, path, "$ref")
            return self._reference(schema["$ref"], path)
        if any(key in schema for key in VALUES):
            return self._values(schema, path)
        structured = any(key in schema for words in FAMILIES.values() for key in words)
        for key in COMBINERS:
            if key in schema and structured:
                self.skip(path, key)
            elif key in schema:
                self._only(schema, path, key, "type")
                return self._combined(schema, key, path)
        return self._typed(schema, path)

    def skip(self, path: str, key: str) -> None:
        """Note a keyword as not enforced."""
        self.unenforced.append(at(path, key))

    def _only(self, schema: Mapping[str, Any], path: str, *kept: str) -> None:
        """Note all other assertions of a schema as not enforced."""
        unnamed = set(unknown(schema)).union(kept)
        for key in assertions(schema):
            if key not in unnamed:
                self.skip(path, key)

    def _reference(self, pointer: Any, path: str) -> str | None:
        if not isinstance(pointer, str) or not (pointer == "#" or pointer.startswith("#/")):
            self.skip(path, "$ref")
            return self.rules.shared("value")
        if pointer not in self._references:
            target = self._target(pointer, path)
            name = self._references[pointer] = self.rules.fresh("ref")
            body = self.node(target, self._where + "".join(at("", key) for key in _steps(pointer)))
            if body is None:
                raise RequestError(f"json_schema: no value is valid by {pointer}, which {path} refers to")
            self.rules.define(name, body)
        return self._references[pointer]

    def _target(self, pointer: str, path: str) -> Any:
        found = self._root
        for key in _steps(pointer):
            if isinstance(found, list) and key.isdecimal() and int(key) < len(found):
                found = found[int(key)]
            elif isinstance(found, Mapping) and key in found:
                found = found[key]
            else:
                raise RequestError(
                    f"json_schema: {at(path, '$ref')} is {pointer!r:.60}, which is not in the schema; it takes # or "
                    "#/ and the way to a part of this schema"
                )
        return found

    def resolved(self, schema: Any) -> Any:
        """What a schema that is only a reference refers to."""
        for _ in range(DEEPEST):
            if not isinstance(schema, Mapping) or assertions(schema) != ["$ref"]:
                break
            if not str(schema["$ref"]).startswith("#"):
                return schema
            schema = self._target(str(schema["$ref"]), self._where)
        return schema

    def _values(self, schema: Mapping[str, Any], path: str) -> str | None:
        self._only(schema, path, "type", *VALUES)
        values = kind(schema, "enum", path, list, "a list of values")
        if "const" in schema:
            values = [schema["const"]] if values is None or shares_value(values, schema["const"]) else []
        if "type" in schema:
            types = types_of(schema, path)
            values = [value for value in values if any(is_type(value, name) for name in types)]
        return self._any([self._value(value) for value in values], "values")

    def _value(self, value: Any) -> str:
        """One JSON value, with any white space between its tokens."""
        if isinstance(value, str):
            return json_literal(value)
        gap, comma = self.rules.shared("gap"), self.rules.shared("comma")
        if isinstance(value, list):
            return f'"[" {gap} {f" {comma} ".join(map(self._value, value))} {gap} "]"'
        if isinstance(value, Mapping):
            colon = self.rules.shared("colon")
            members = (f"{json_literal(key)} {colon} {self._value(item)}" for key, item in value.items())
            return f'"{{" {gap} {f" {comma} ".join(members)} {gap} "}}"'
        return literal(json.dumps(value))

    def _combined(self, schema: Mapping[str, Any], key: str, path: str) -> str | None:
        options = kind(schema, key, path, list, "a list of schemas")
        if not options:
            raise wrong(at(path, key), options, "a list of at least one schema")
        if key == "oneOf" and not all_disjoint(options, self.resolved):
            self.skip(path, key)
        if key == "allOf" and len(options) > 1:
            self.skip(path, key)
            options = options[:1]
        where = at(path, key)
        found = [self.node(self._inherit(schema, one, path), at(where, place)) for place, one in enumerate(options)]
        return self._any([one for one in found if one], "either")

    def _inherit(self, schema: Mapping[str, Any], option: Any, path: str) -> Any:
        """An option with the type that stands beside the list it is in."""
        if "type" not in schema or option is False:
            return option
        option = self.resolved(option)
        if option is True:
            return {"type": schema["type"]}
        if isinstance(option, Mapping) and "$ref" not in option and not any(key in option for key in COMBINERS):
            mine, theirs = types_of(schema, path), types_of(option, path)
            both = [name for name in theirs if name in mine or (name == "integer" and "number" in mine)]
            both += ["integer"] if "integer" in mine and "number" in theirs and "integer" not in both else []
            return {**option, "type": both} if both else False
        self.skip(path, "type")
        return option

    def _typed(self, schema: Mapping[str, Any], path: str) -> str | None:
        types = types_of(schema, path)
        if "type" not in schema and len(types) == len(TYPES):
            return self.rules.shared("value")
        if "number" in types:
            types = [name for name in types if name != "integer"]
        return self._any([one for one in (self._of_type(name, schema, path) for name in types) if one], "typed")

    def _of_type(self, name: str, schema: Mapping[str, Any], path: str) -> str | None:
        if name == "string":
            return self.string(schema, path)
        if name in ("number", "integer"):
            return self._number(schema, path, whole=name == "integer")
        if name == "array":
            return self._array(schema, path)
        if name == "object":
            return self._object(schema, path)
        return '"null"' if name == "null" else '("true" | "false")'

    def _shaped(self, schema: Mapping[str, Any], path: str, spelling: Spelling) -> str | None:
        """The characters of a string with a pattern or format; None without one that is enforced."""
        pattern = kind(schema, "pattern", path, str, "a regular expression")
        form = kind(schema, "format", path, str, "the name of a format")
        if pattern is not None:
            if form is not None:
                self.skip(path, "format")
            try:
                return regex.anywhere(pattern, spelling)
            except regex.UnsupportedError:
                self.skip(path, "pattern")
                return None
            except RequestError as error:
                raise RequestError(f"json_schema: {at(path, 'pattern')}: {error}") from error
        if form is not None and form not in FORMATS:
            self.skip(path, "format")
        return None if form is None or form not in FORMATS else regex.whole(FORMATS[form], spelling)

    def _number(self, schema: Mapping[str, Any], path: str, whole: bool) -> str | None:
        low = _tighter(schema, "minimum", "exclusiveMinimum", path, 1)
        high = _tighter(schema, "maximum", "exclusiveMaximum", path, -1)
        step = number(schema, "multipleOf", path)
        if step is not None and step <= 0:
            raise wrong(at(path, "multipleOf"), step, "a number above 0")
        if step is not None and step != int(step):
            self.skip(path, "multipleOf")
            step = None
        if not whole and step is None:
            body = decimals(low, high)
        else:
            body = self._integer(_inner(low, 1), _inner(high, -1), int(step or 1), path)
        return body and self.rules.rule("number", body)

    def _integer(self, low: int | None, high: int | None, step: int, path: str) -> str | None:
        if step == 1:
            return integers(low, high)
        if low is not None and high is not None and (high - low) // step <= MOST_LISTED:
            return self._any([f'"{value}"' for value in range(-(-low // step) * step, high + 1, step)], "multiple")
        if low is None and high is None and step <= MOST_STEPS:
            name = self.rules.fresh("multiple")
            body, rules = multiples(step, f"{name}rest")
            self.rules.define(name, body)
            for rest, one in rules:
                self.rules.define(rest, one)
            return name
        self.skip(path, "multipleOf")
        return integers(low, high)

    def _array(self, schema: Mapping[str, Any], path: str) -> str | None:
        low, high = count(schema, "minItems", path) or 0, count(schema, "maxItems", path)
        if schema.get("uniqueItems") and (high is None or high > 1):
            self.skip(path, "uniqueItems")
        if "contains" in schema and not (schema.get("minContains") == 0 and "maxContains" not in schema):
            self.skip(path, "contains")
        first, rest = self._items(schema, path, low)
        if None in first:
            first = first[: first.index(None)]
            rest = None
        most = len(first) if rest is None else None
        high = most if high is None or (most is not None and most < high) else high
        if high is not None and high < low:
            return None
        return self.rules.rule("array", self._list([item for item in first if item], rest, low, high))

    def _items(self, schema: Mapping[str, Any], path: str, low: int) -> tuple[list[str | None], str | None]:
        """The items at the beginning, and those behind (None: there are none)."""
        prefix, key, more = schema.get("prefixItems"), "prefixItems", "items"
        if isinstance(schema.get("items"), list):  # as up to draft 2019-09
            prefix, key, more = schema["items"], "items", "additionalItems"
        if not isinstance(prefix, list | None):
            raise wrong(at(path, key), prefix, "a list of schemas")
        first = [self.node(item, at(at(path, key), place)) for place, item in enumerate(prefix or ())]
        more = more if more in schema else "unevaluatedItems"
        if more in schema:
            return first, self.node(schema[more], at(path, more))
        return first, None if first and low <= len(first) else self.rules.shared("value")

    def _list(self, first: Sequence[str], rest: str | None, low: int, high: int | None) -> str:
        gap, comma = self.rules.shared("gap"), self.rules.shared("comma")

        def after(place: int) -> str:
            if place == high:
                return ""
            if place >= len(first):
                most = None if high is None else high - place
                return any_of(self.rules, f"{comma} {rest}", max(0, low - place), most)
            item = f"{comma} {first[place]} {after(place + 1)}"
            return item if place < low else f"({item})?"

        if high == 0:
            return f'"[" {gap} "]"'
        inner = f"{first[0] if first else rest} {after(1)} {gap}"
        return f'"[" {gap} {inner if low else f"({inner})?"} "]"'

    def _object(self, schema: Mapping[str, Any], path: str) -> str | None:
        for key in ("dependentRequired", "dependentSchemas", "dependencies"):
            if schema.get(key):
                self.skip(path, key)
        members = self._members(schema, path)
        if members is None:
            return None
        low, high = count(schema, "minProperties", path) or 0, count(schema, "maxProperties", path)
        if members.other is not None and low > max(1, sum(member.required for member in members.declared)):
            self.skip(path, "minProperties")  # other keys may come twice, and then count once
            low = 1
        body = members.ebnf(self.rules, low, high)
        return body and self.rules.rule("object", body)

    def _members(self, schema: Mapping[str, Any], path: str) -> Members | None:
        properties = kind(schema, "properties", path, Mapping, "an object of schemas") or {}
        required = kind(schema, "required", path, list, "a list of names") or []
        if not all(isinstance(name, str) for name in required):
            raise wrong(at(path, "required"), required, "a list of names")
        other = self._other(schema, path, properties)
        declared = []
        for name, item in properties.items():
            value = self.node(item, at(at(path, "properties"), name))
            if value is None and name in required:
                return None
            if value is not None:
                declared.append(Member(name, value, name in required))
        for name in dict.fromkeys(required):
            if name not in properties:
                value = self._undeclared(schema, path)
                if value is None:
                    return None
                declared.append(Member(name, value, True))
        return Members(declared, other, tuple(properties))

    def _undeclared(self, schema: Mapping[str, Any], path: str) -> str | None:
        """The value of a property that is required but not among the properties."""
        for key in ("patternProperties", "propertyNames"):
            if schema.get(key):
                self.skip(path, key)
        key = "additionalProperties" if "additionalProperties" in schema else "unevaluatedProperties"
        return self.node(schema.get(key, True), at(path, key))

    def _other(
        self, schema: Mapping[str, Any], path: str, declared: Mapping[str, Any]
    ) -> tuple[str | None, str] | None:
        """Key (None: any but the declared ones) and value of further members; None: there are none."""
        patterns = kind(schema, "patternProperties", path, Mapping, "an object of schemas") or {}
        names = schema.get("propertyNames")
        more = "additionalProperties" if "additionalProperties" in schema else "unevaluatedProperties"
        if patterns:
            return self._by_pattern(patterns, schema, path, declared)
        value = self.node(schema.get(more, not declared), at(path, more))
        if names is not None and declared:
            self.skip(path, "propertyNames")
        elif names is not None and value is not None:
            key = self.node(
                {"type": "string", **names} if isinstance(names, Mapping) else names, at(path, "propertyNames")
            )
            return None if key is None else (key, value)
        return None if value is None else (None, value)

    def _by_pattern(
        self, patterns: Mapping[str, Any], schema: Mapping[str, Any], path: str, declared: Mapping[str, Any]
    ) -> tuple[str | None, str] | None:
        (pattern, item), *others = patterns.items()
        where = at(path, "patternProperties")
        try:
            key = regex.anywhere(pattern, self._quoted)
            clashes = any(re.search(one, name) for one in patterns for name in declared)
        except (regex.UnsupportedError, re.error):
            key, clashes = "", True
        except RequestError as error:
            raise RequestError(f"json_schema: {where}: {error}") from error
        if others or clashes or "propertyNames" in schema:
            self.skip(path, "patternProperties")
            if "propertyNames" in schema:
                self.skip(path, "propertyNames")
            return None
        value = self.node(item, at(where, pattern))
        return None if value is None else (self.rules.rule("key", f'"\\"" {key} "\\""'), value)

    def _any(self, options: Sequence[str], hint: str) -> str | None:
        if len(options) > 1:
            return self.rules.rule(hint, " | ".join(options))
        return options[0] if options else None


def _steps(pointer: str) -> list[str]:
    """The keys of a JSON pointer in a URI fragment."""
    return [unquote(step).replace("~1", "/").replace("~0", "~") for step in pointer.split("/")[1:]]


def _tighter(schema: Mapping[str, Any], closed: str, opened: str, path: str, sign: int) -> Bound | None:
    """The tighter of an inclusive and an exclusive bound; `sign` 1: from below, -1: from above."""
    bounds = []
    for key, is_open in ((closed, False), (opened, True)):
        value = number(schema, key, path)
        if value is not None and not math.isfinite(value):
            raise wrong(at(path, key), value, "a finite number")
        if value is not None:
            bounds.append(Bound(Decimal(str(value)), is_open))
    return max(bounds, key=lambda bound: (sign * bound.value, bound.open), default=None)


def _inner(bound: Bound | None, sign: int) -> int | None:
    """The first integer within a bound."""
    if bound is None:
        return None
    first = math.ceil(bound.value) if sign > 0 else math.floor(bound.value)
    return first + sign if bound.open and first == bound.value else first
