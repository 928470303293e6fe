"""A grammar while it is written: named rules, and the few that every JSON grammar needs."""

import json

from deepinfer.sampling.grammar.charset import ANY, CharSet, literal
from deepinfer.sampling.grammar.numbers import ANY_NUMBER

DEEPEST_INDENT = 40
"""White space is what compact, default and indented JSON have: with more a model could go on for ever."""

_RAW = ANY - CharSet.of((0, 0x1F)) - CharSet.chars('"\\')
_SHORT = {'"': '"', "\\": "\\", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}


class Rules:
    """Rules of one grammar, each written once; `text` is the whole as EBNF."""

    def __init__(self) -> None:
        self._bodies: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._bodies)

    def fresh(self, hint: str) -> str:
        """Reserve a rule name."""
        name = f"{hint}{len(self._bodies)}"
        self._bodies[name] = ""
        return name

    def define(self, name: str, body: str) -> None:
        """Set or change what a rule says."""
        self._bodies[name] = body

    def rule(self, hint: str, body: str) -> str:
        """Add a rule and return its name."""
        name = self.fresh(hint)
        self.define(name, body)
        return name

    def shared(self, name: str) -> str:
        """The name of one of the rules of `JSON`, defined with all that it needs."""
        if name not in self._bodies:
            body, needs = JSON[name]
            self._bodies[name] = body
            for need in needs:
                self.shared(need)
        return name

    def text(self, root: str) -> str:
        """The grammar as EBNF with `root` as what it begins with."""
        return "\n".join([f"root ::= {root}", *(f"{name} ::= {body}" for name, body in self._bodies.items())])


def json_raw(chars: CharSet) -> str:
    """A class of those characters that stand for themselves in a JSON string; empty without any."""
    raw = chars & _RAW
    return raw.ebnf() if raw else ""


def json_escaped(chars: CharSet, rules: Rules) -> str:
    """How a JSON string spells the others, and with all characters any of them; empty without any."""
    if chars == ANY:
        return rules.shared("escaped")
    parts = []
    short = [literal(spelling) for char, spelling in _SHORT.items() if char in chars]
    if short:
        parts.append(f'"\\\\" ({" | ".join(short)})')
    controls = [code for code in range(0x20) if chr(code) in chars and chr(code) not in _SHORT]
    if controls:
        parts.append('"\\\\u00" (' + " | ".join(f'"{code:02x}"' for code in controls) + ")")
    return f"({' | '.join(parts)})" if parts else ""


def json_literal(value: str) -> str:
    """A JSON string as an EBNF literal."""
    try:
        value.encode()
    except UnicodeEncodeError:  # a lone surrogate is only possible as an escape
        return literal(json.dumps(value))
    return literal(json.dumps(value, ensure_ascii=False))


JSON: dict[str, tuple[str, tuple[str, ...]]] = {
    "gap": (f'"" | " " | "\\n" [ \\t]{{0,{DEEPEST_INDENT}}}', ()),
    "comma": ('"," gap', ("gap",)),
    "colon": ('":" " "?', ()),
    "escaped": (
        '"\\\\" (["\\\\/bfnrt] | "u" ([0-9abcefABCEF] hex hex hex | [dD] [0-7] hex hex '
        '| [dD] [89abAB] hex hex "\\\\u" [dD] [c-fC-F] hex hex))',
        ("hex",),
    ),
    "hex": ("[0-9a-fA-F]", ()),
    "string": (f'"\\"" {_RAW.ebnf()}* (escaped {_RAW.ebnf()}*)* "\\""', ("escaped",)),
    "number": (ANY_NUMBER, ()),
    "value": ('string | number | object | array | "true" | "false" | "null"', ("string", "number", "object", "array")),
    "member": ("string colon value", ("string", "colon", "value")),
    "object": ('"{" gap (member (comma member)* gap)? "}"', ("gap", "comma", "member")),
    "array": ('"[" gap (value (comma value)* gap)? "]"', ("gap", "comma", "value")),
}
"""Rules of JSON itself: body, and the rules it uses."""
