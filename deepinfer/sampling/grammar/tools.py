"""Tool calls in the V4.1 format as EBNF: free text, then at most one block of calls, which ends the reply.

A call's name is one of the declared ones and its arguments follow the declared schema. The markup token is a token
here, not its spelling: what only looks like it stays text.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from deepinfer.core.errors import RequestError
from deepinfer.sampling.grammar.charset import ANY, CharSet, literal
from deepinfer.sampling.grammar.ebnf import Rules
from deepinfer.sampling.grammar.keywords import (
    COMBINERS,
    VALUES,
    assertions,
    at,
    is_type,
    kind,
    types_of,
    unknown,
    wrong,
)
from deepinfer.sampling.grammar.schema import SchemaWriter, Translation

_TEXT = f"{ANY.ebnf()}*"
_NAME = ANY - CharSet.of((0, 0x1F)) - CharSet.chars('"<>&\\')
_PARAMETERS = ("type", "properties", "required", "additionalProperties")


def tool_calls(tools: Sequence[Mapping[str, Any]], markup: int, *, open_block: bool = False) -> Translation:
    """The grammar of replies; `markup` is the id of the DSML token.

    tools: OpenAI function tools. open_block: the prompt has opened the block, so that the reply starts with a call.
    RequestError for a tool whose parameters are no JSON schema.
    """
    rules = Rules()
    writer = _ToolWriter(rules, markup)
    calls = [call for place, tool in enumerate(tools) if (call := writer.call(tool, f"tools[{place}]"))]
    if not calls:
        raise RequestError("tools: none of the declared tools can be called with valid arguments")
    block = f"({' | '.join(calls)})+ {writer.end('calls')}"
    if not open_block:
        block = f"{_TEXT} ({writer.begin('calls', '')} {block})?"
    return Translation(rules.text(block), tuple(writer.unenforced))


class _ToolWriter:
    """Writes calls as rules of one grammar."""

    def __init__(self, rules: Rules, markup: int) -> None:
        self.unenforced: list[str] = []
        self._rules, self._markup = rules, f"Token({markup})"

    def begin(self, tag: str, attributes: str) -> str:
        return f'"<" {self._markup} {literal(f" {tag}{attributes}>" + chr(10))}'

    def end(self, tag: str, after: str = "") -> str:
        return f'"</" {self._markup} {literal(f" {tag}>{after}")}'

    def call(self, tool: Mapping[str, Any], where: str) -> str | None:
        """A rule for calls of one tool; None if no arguments are valid."""
        function = tool.get("function", tool)
        schema = function.get("parameters")
        path = f"{where}.function.parameters"
        arguments = '""' if not schema else self._arguments(schema, path)
        if arguments is None:
            return None
        name = f' name="{function.get("name", "")}"'
        return self._rules.rule(
            "call", f'{self.begin("invoke", name)} {arguments} "\\n"? {self.end("invoke", chr(10))}'
        )

    def _arguments(self, schema: Any, path: str) -> str | None:
        """The parameters of an object schema in their order, each on a line; None if no object is valid."""
        writer = SchemaWriter(schema, self._rules, path)
        try:
            found = writer.resolved(schema)
            found = {} if found is True else found
            if not isinstance(found, Mapping) or "object" not in types_of({"type": "object", **found}, path):
                raise wrong(path, found, "the schema of an object")
            for key in assertions(found):
                if key not in _PARAMETERS or (key == "additionalProperties" and "properties" in found and found[key]):
                    writer.skip(path, key)
            return self._lines(writer, found, path)
        finally:
            self.unenforced += writer.unenforced

    def _lines(self, writer: SchemaWriter, schema: Mapping[str, Any], path: str) -> str | None:
        properties = kind(schema, "properties", path, Mapping, "an object of schemas")
        required = kind(schema, "required", path, list, "a list of names") or []
        if properties is None and schema.get("additionalProperties", True) is not False:
            properties = dict.fromkeys(required, True)
            other = self._line(writer, f"{_NAME.ebnf()}+", schema.get("additionalProperties", True), path)
        else:
            properties, other = {**(properties or {}), **dict.fromkeys(required, True), **(properties or {})}, None
        parts = []
        for name, item in properties.items():
            line = self._line(writer, literal(name), item, at(at(path, "properties"), name))
            if line is None and name in required:
                return None
            if line is not None:
                parts.append(line if name in required else f"({line})?")
        parts += [f"({other})*"] if other else []
        return " ".join(parts) or '""'

    def _line(self, writer: SchemaWriter, name: str, schema: Any, path: str) -> str | None:
        """One parameter: strings bare, other values as JSON."""
        options = []
        for is_text, body in self._forms(writer, schema, path):
            flag = literal(f'" string="{"true" if is_text else "false"}">')
            options.append(f"{flag} {body}")
        if not options:
            return None
        lead = literal(' parameter name="')
        start = f'"<" {self._markup} {lead} {name}'
        return self._rules.rule("parameter", f"{start} ({' | '.join(options)}) {self.end('parameter', chr(10))}")

    def _forms(self, writer: SchemaWriter, schema: Any, path: str) -> list[tuple[bool, str]]:
        """The values of a schema: which are bare text, which JSON."""
        schema = writer.resolved(schema)
        if not isinstance(schema, Mapping) or "$ref" in schema:
            value = writer.node(schema, path)
            return [(True, _TEXT), (False, value)] if schema is True and value else [(False, value)] if value else []
        values = [key for key in VALUES if key in schema]
        if values:
            return self._listed(writer, schema, path)
        plain = set(assertions(schema)) - set(unknown(schema))
        for key in ("anyOf", "oneOf"):
            if plain == {key} and isinstance(schema[key], list):
                where = at(path, key)
                return [form for n, one in enumerate(schema[key]) for form in self._forms(writer, one, at(where, n))]
        types = types_of(schema, path) if not any(key in schema for key in COMBINERS) else []
        forms: list[tuple[bool, str | None]] = []
        if "string" in types:
            forms.append((True, writer.string(schema, path, raw=True)))
            types.remove("string")
        if types:
            forms.append((False, writer.node({**schema, "type": types}, path)))
        elif forms:
            for key in unknown(schema):
                writer.skip(path, key)
        else:
            forms.append((False, writer.node(schema, path)))
        return [(is_text, body) for is_text, body in forms if body is not None]

    def _listed(self, writer: SchemaWriter, schema: Mapping[str, Any], path: str) -> list[tuple[bool, str]]:
        """The forms of listed values."""
        listed = [schema["const"]] if "const" in schema else kind(schema, "enum", path, list, "a list of values")
        if "type" in schema:
            listed = [value for value in listed if any(is_type(value, name) for name in types_of(schema, path))]
        texts = [value for value in listed if isinstance(value, str)]
        others = [value for value in listed if not isinstance(value, str)]
        forms = [(True, f"({' | '.join(map(literal, texts))})")] if texts else []
        bare = {key: value for key, value in schema.items() if key not in VALUES}
        body = writer.node({**bare, "enum": others}, path)  # notes what stands beside the values, too
        return [*forms, (False, body)] if body else forms
