"""JSON schemas as grammars: what is generated is valid by jsonschema; what is not enforced is named, word by word."""

import json
import random
from typing import Any

import jsonschema
import pytest
from grammar_tools import accepts, random_schema, text_of, walk

from deepinfer.core.errors import RequestError
from deepinfer.sampling.grammar.constraint import structured_output
from deepinfer.sampling.grammar.formats import FORMATS
from deepinfer.sampling.grammar.schema import translate

INT, TEXT = {"type": "integer"}, {"type": "string"}


def of(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


# keyword: schema, valid values the grammar allows, values it must refuse because the schema does.
ENFORCED: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "type": (INT, [1, -5], ["1", 1.5, None]),
    "type list": ({"type": ["string", "null"]}, ["a", None], [1]),
    "enum": ({"enum": ["a", 1, None, {"b": [1]}]}, ["a", 1, None, {"b": [1]}], ["b", 2, {"b": [2]}]),
    "enum and type": ({"type": "string", "enum": ["a", 1]}, ["a"], [1]),
    "const": ({"const": {"a": [1, "x"]}}, [{"a": [1, "x"]}], [{"a": [1]}]),
    "minLength": ({"type": "string", "minLength": 3}, ["abc", '\n"\\'], ["ab", "\U0001f600a"]),
    "maxLength": ({"type": "string", "maxLength": 2}, ["ab", "é\U0001f600"], ["abc"]),
    "a long minLength": ({"type": "string", "minLength": 35}, ['"' * 35, "\n" * 40], ["a" * 34, '"' * 34, ""]),
    "a long maxLength": (
        {"type": "string", "minLength": 33, "maxLength": 70},
        ["x" * 33, '\\"' * 35, "é" * 69, "a" * 64],
        ["x" * 32, '"' * 71],
    ),
    "a long maxItems": (
        {"items": INT, "type": "array", "minItems": 40, "maxItems": 100},
        [[1] * 40, [3] * 100],
        [[1] * 39, [1] * 101],
    ),
    "many properties": (
        {"type": "object", "additionalProperties": INT, "maxProperties": 40},
        [{f"k{n}": n for n in range(40)}, {}],
        [{f"k{n}": n for n in range(41)}],
    ),
    "pattern": ({"type": "string", "pattern": "^a+$"}, ["aa"], ["ab", "ba", ""]),
    "pattern anywhere": ({"type": "string", "pattern": "b"}, ["b", "abc", '\nb"'], ["a", ""]),
    "pattern of escapes": ({"type": "string", "pattern": '^["\\\\\\n]+$'}, ['"\\\n'], ["a", "n"]),
    "minimum": ({"type": "integer", "minimum": 3}, [3, 10], [2, -4]),
    "minimum without type": ({"minimum": 3}, [3, 4.5], [2]),
    "bounds of an integer": ({"type": "integer", "exclusiveMinimum": 2.5, "maximum": 9.9}, [3, 9], [2, 10]),
    "bounds of a number": ({"type": "number", "exclusiveMinimum": 0, "maximum": 3.5}, [0.1, 3.5], [0, -1, 3.6]),
    "multipleOf": ({"type": "integer", "multipleOf": 3}, [0, -9, 12], [4, 11]),
    "multipleOf in a range": ({"multipleOf": 4, "minimum": 6, "maximum": 17}, [8, 16], [4, 9, 20]),
    "items": ({"type": "array", "items": INT}, [[], [1, 2]], [["a"], [1, "a"]]),
    "minItems": ({"type": "array", "minItems": 2}, [[1, "a"]], [[], [1]]),
    "maxItems": ({"type": "array", "items": INT, "maxItems": 2}, [[1, 2]], [[1, 2, 3]]),
    "prefixItems": ({"type": "array", "prefixItems": [INT, TEXT], "items": INT}, [[1, "a", 2], [1]], [["a"], [1, 2]]),
    "items false": ({"prefixItems": [INT, TEXT], "items": False}, [[1, "a"]], [[1, "a", 2]]),
    "prefix and maxItems": ({"prefixItems": [INT, TEXT], "minItems": 1, "maxItems": 1}, [[1]], [[], [1, "a"]]),
    "unevaluatedItems": ({"prefixItems": [INT], "unevaluatedItems": TEXT}, [[1, "a"]], [[1, 2]]),
    "uniqueItems of one": ({"items": INT, "uniqueItems": True, "maxItems": 1}, [[1]], [[1, 1]]),
    "properties": (of(a=INT, b=TEXT), [{"a": 1, "b": "x"}, {}, {"b": "x"}], [{"a": "x"}, {"b": 1}]),
    "required": ({**of(a=INT, b=TEXT), "required": ["b"]}, [{"b": "x"}], [{"a": 1}, {}]),
    "required undeclared": ({**of(a=INT), "required": ["z"]}, [{"a": 1, "z": [2]}, {"z": 1}], [{"a": 1}, {}]),
    "additionalProperties": (
        {**of(a=INT, ab=INT), "additionalProperties": TEXT},
        [{"a": 1, "b": "x"}, {"abc": "x", "": "y"}],
        [{"b": 1}, {"a": "x"}, {"ab": "x"}],
    ),
    "additionalProperties false": ({**of(a=INT), "additionalProperties": False}, [{"a": 1}], [{"b": 1}]),
    "unevaluatedProperties": ({**of(a=INT), "unevaluatedProperties": TEXT}, [{"b": "x"}], [{"b": 1}]),
    "patternProperties": ({"patternProperties": {"^a": INT}}, [{"a1": 1, "ab": 2}], [{"a1": "x"}]),
    "patternProperties apart": (
        {**of(b=TEXT), "patternProperties": {"^a": INT}},
        [{"b": "x", "a1": 1}],
        [{"a1": "x"}, {"b": 1}],
    ),
    "propertyNames": ({"type": "object", "propertyNames": {"pattern": "^a"}}, [{"ab": 1}], [{"b": 1}]),
    "minProperties": ({**of(a=INT, b=INT, c=INT), "minProperties": 2}, [{"a": 1, "c": 1}], [{"a": 1}, {}]),
    "minProperties open": ({"type": "object", "minProperties": 1}, [{"x": 1}], [{}]),
    "maxProperties": ({**of(a=INT, b=INT), "maxProperties": 1}, [{"a": 1}, {"b": 1}, {}], [{"a": 1, "b": 1}]),
    "anyOf": ({"anyOf": [INT, TEXT]}, [1, "a"], [None]),
    "anyOf and type": ({"type": "integer", "anyOf": [{"minimum": 5}, {"maximum": 2}, TEXT]}, [7, 1], [3, "a"]),
    "oneOf by type": ({"oneOf": [INT, TEXT]}, [1, "a"], [None]),
    "oneOf by a property": (
        {
            "oneOf": [
                {**of(kind={"const": "a"}, n=INT), "required": ["kind"]},
                {**of(kind={"const": "b"}, s=TEXT), "required": ["kind"]},
            ]
        },
        [{"kind": "a", "n": 1}, {"kind": "b", "s": "x"}],
        [{"kind": "a", "n": "x"}, {"kind": "c"}],
    ),
    "allOf of one": ({"allOf": [INT]}, [1], ["a"]),
    "$ref": ({"$defs": {"a/b": INT}, "$ref": "#/$defs/a~1b"}, [1], ["a"]),
    "$ref to the root": (of(v=INT, next={"$ref": "#"}), [{"v": 1, "next": {"v": 2}}], [{"next": {"v": "x"}}]),
    "true": (True, [1, "a", {"x": [None, True, -1.5e3]}], []),
    "false within": ({**of(a=False, b=INT)}, [{"b": 1}], [{"a": 1}]),
}


@pytest.mark.parametrize("name", ENFORCED)
def test_a_keyword_is_enforced(name: str) -> None:
    schema, good, bad = ENFORCED[name]
    validator = jsonschema.Draft202012Validator(schema)
    found = translate(schema)
    assert found.unenforced == ()
    for value in good:
        assert validator.is_valid(value)
        for form in ({"separators": (",", ":")}, {}, {"indent": 2}):
            text = json.dumps(value, ensure_ascii=False, **form)
            assert accepts(found.ebnf, text), text
    for value in bad:
        assert not validator.is_valid(value)
        for separators in ((",", ":"), (", ", ": ")):
            assert not accepts(found.ebnf, json.dumps(value, separators=separators)), value


UNENFORCED: dict[str, tuple[Any, str]] = {
    "uniqueItems": ({"type": "array", "items": INT, "uniqueItems": True}, "$.uniqueItems"),
    "contains": ({"type": "array", "contains": INT}, "$.contains"),
    "allOf": ({"allOf": [{"minimum": 3}, {"maximum": 5}]}, "$.allOf"),
    "allOf beside": ({**of(a=INT), "allOf": [{"required": ["a"]}]}, "$.allOf"),
    "anyOf beside": ({**of(a=INT, b=INT), "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, "$.anyOf"),
    "oneOf overlapping": ({"oneOf": [INT, {"type": "number"}]}, "$.oneOf"),
    "not": ({"type": "integer", "not": {"const": 3}}, "$.not"),
    "if": ({**of(a=INT, b=INT), "if": {"required": ["a"]}, "else": False}, "$.if, $.else"),
    "dependentRequired": ({**of(a=INT, b=INT), "dependentRequired": {"a": ["b"]}}, "$.dependentRequired"),
    "dependentSchemas": ({**of(a=INT), "dependentSchemas": {"a": {"maxProperties": 1}}}, "$.dependentSchemas"),
    "$dynamicRef": ({"$dynamicRef": "#x"}, "$.$dynamicRef"),
    "$ref elsewhere": ({"$ref": "https://example.org/x"}, "$.$ref"),
    "beside $ref": ({"$defs": {"x": INT}, "$ref": "#/$defs/x", "minimum": 5}, "$.minimum"),
    "beside enum": ({"enum": ["a", "abc"], "minLength": 2}, "$.minLength"),
    "format": ({"type": "string", "format": "idn-email"}, "$.format"),
    "format and length": ({"type": "string", "format": "email", "maxLength": 9}, "$.maxLength"),
    "pattern and length": ({"type": "string", "pattern": "^a+$", "minLength": 2}, "$.minLength"),
    "pattern and format": ({"type": "string", "pattern": "^2", "format": "date"}, "$.format"),
    "pattern beyond grammars": ({"type": "string", "pattern": "^(?=a)"}, "$.pattern"),
    "multipleOf of a number": ({"type": "number", "multipleOf": 0.01}, "$.multipleOf"),
    "multipleOf and minimum": ({"type": "integer", "multipleOf": 3, "minimum": 4}, "$.multipleOf"),
    "patternProperties twice": ({"patternProperties": {"^a": INT, "b$": TEXT}}, "$.patternProperties"),
    "patternProperties and property": ({**of(ab=TEXT), "patternProperties": {"^a": INT}}, "$.patternProperties"),
    "propertyNames and properties": ({**of(bb=INT), "propertyNames": {"maxLength": 1}}, "$.propertyNames"),
    "minProperties of open objects": ({"type": "object", "minProperties": 2}, "$.minProperties"),
    "unknown": ({"type": "integer", "maximun": 3}, "$.maximun"),
    "inside": (of(list={"items": {"uniqueItems": True}}), "$.properties.list.items.uniqueItems"),
    "odd name": (of(**{"a b": {"not": {}}}), "$.properties['a b'].not"),
}


@pytest.mark.parametrize("name", UNENFORCED)
def test_a_keyword_that_is_not_enforced_is_refused_with_its_path(name: str) -> None:
    schema, path = UNENFORCED[name]
    with pytest.raises(RequestError, match="does not enforce") as caught:
        structured_output({"json_schema": schema})
    assert path in str(caught.value)
    partial = structured_output({"json_schema": schema, "partial": True})
    assert ", ".join(partial.unenforced) == path


WRONG: dict[str, tuple[Any, str]] = {
    "no schema": (3, r"\$ is 3; it takes an object, true or false"),
    "type": ({"type": "foo"}, r"\$\.type is 'foo'; it takes one of string"),
    "type of another type": (of(a={"type": 5}), r"\$\.properties\.a\.type is 5"),
    "minLength": ({"type": "string", "minLength": -1}, "minLength is -1; it takes a whole number >= 0"),
    "minimum": ({"minimum": True}, "minimum is True; it takes a number"),
    "multipleOf": ({"type": "integer", "multipleOf": 0}, "multipleOf is 0; it takes a number above 0"),
    "required": (of(a=INT) | {"required": "a"}, "required is 'a'; it takes a list of names"),
    "properties": ({"properties": [1]}, "properties is .1.; it takes an object of schemas"),
    "items": ({"items": 4}, r"\$\.items is 4; it takes an object, true or false"),
    "anyOf": ({"anyOf": []}, "anyOf is ..; it takes a list of at least one schema"),
    "pattern": ({"pattern": "("}, r"\$\.pattern: .* is no regular expression"),
    "$ref": ({"$ref": "#/$defs/x"}, r"\$\.\$ref is '#/\$defs/x', which is not in the schema"),
    "nothing valid": ({"type": "integer", "minimum": 3, "maximum": 2}, "no value is valid"),
    "false": (False, "no value is valid"),
    "empty enum": ({"enum": []}, "no value is valid"),
    "required but false": (of(a=False) | {"required": ["a"]}, "no value is valid"),
    "text": ("{", "json_schema is text, but no JSON"),
    "not JSON": ({"enum": [object()]}, "cannot be written as JSON"),
    "not a number": ({"enum": [float("nan")]}, "cannot be written as JSON"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_schema_is_refused(name: str) -> None:
    schema, message = WRONG[name]
    with pytest.raises(RequestError, match=message):
        structured_output({"json_schema": schema})


def test_hostile_sizes_get_one_error() -> None:
    deep: dict[str, Any] = {}
    for _ in range(2000):
        deep = {"items": deep}
    for schema in (deep, {"anyOf": [INT] * 30_000}, {"enum": ["x" * (1 << 20)]}):
        with pytest.raises(RequestError, match=r"levels|characters|JSON"):
            structured_output({"json_schema": schema})


@pytest.mark.parametrize("name", FORMATS)
def test_formats_generate_what_the_checker_takes(name: str) -> None:
    rng = random.Random(name)
    schema = {"type": "string", "format": name}
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    validator = jsonschema.Draft202012Validator(schema, format_checker=checker)
    for _ in range(8):
        tokens, ended = walk(translate(schema).ebnf, rng, 60)
        if ended:
            assert validator.is_valid(json.loads(text_of(tokens))), text_of(tokens)


@pytest.mark.parametrize("day", ["2024-02-29", "2000-02-29", "0001-01-01", "1999-12-31"])
def test_the_calendar_is_kept(day: str) -> None:
    ebnf = translate({"type": "string", "format": "date"}).ebnf
    assert accepts(ebnf, f'"{day}"')
    for wrong in ("2023-02-29", "1900-02-29", "2024-04-31", "0000-01-01", "2024-13-01"):
        assert not accepts(ebnf, f'"{wrong}"')


def test_random_schemas_generate_valid_json() -> None:
    rng = random.Random(11)
    ended = 0
    for _ in range(60):
        schema = random_schema(rng)
        found = translate(schema)
        assert not found.unenforced, schema
        validator = jsonschema.Draft202012Validator(schema)
        for _ in range(2):
            tokens, whole = walk(found.ebnf, rng, 80)
            if whole:
                ended += 1
                validator.validate(json.loads(text_of(tokens)))
    assert ended > 50
