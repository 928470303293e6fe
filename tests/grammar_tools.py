"""Random regexes, schemas and grammars, random walks through what a matcher allows, and independent validators."""

import json
import random
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import lark
import numpy as np
import torch

from deepinfer.sampling.grammar.compiler import Compiler
from deepinfer.sampling.grammar.constraint import Constraint
from deepinfer.sampling.grammar.matcher import Matcher
from deepinfer.sampling.grammar.vocabulary import Vocabulary
from deepinfer.text.spellings import EOS
from deepinfer.text.tokenizer import Tokenizer

MINI = Path(__file__).parent.parent / "checkpoints" / "mini"
PADDED = 4200
"""More ids than the tokenizer has, as a padded output head does."""


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(MINI)


@cache
def compiler() -> Compiler:
    eos = tokenizer().token_id(EOS)
    assert eos is not None
    return Compiler(Vocabulary(tokenizer(), PADDED, eos))


def matcher_of(ebnf: str, *, markup: bool = False, end_thinking: int | None = None) -> Matcher:
    return Matcher(compiler().compile(Constraint("test", ebnf, markup)).result(), end_thinking)


def allowed_ids(matcher: Matcher) -> list[int]:
    bits = torch.zeros((1, compiler().vocabulary.words), dtype=torch.int32)
    matcher.fill(bits)
    return np.flatnonzero(np.unpackbits(bits.numpy().view(np.uint8), bitorder="little")[:PADDED]).tolist()


def accepts(ebnf: str, text: str) -> bool:
    """Whether a grammar allows exactly this text, token by token, and then the end."""
    matcher = matcher_of(ebnf)
    for token in [*tokenizer().encode(text), compiler().vocabulary.eos]:
        if token not in allowed_ids(matcher):
            return False
        matcher.take(token)
    return True


def walk(ebnf: str, rng: random.Random, longest: int = 40, *, markup: bool = False) -> tuple[list[int], bool]:
    """Tokens drawn from what is allowed, short ones and the end preferred; whether the end came."""
    matcher, eos = matcher_of(ebnf, markup=markup), compiler().vocabulary.eos
    tokens: list[int] = []
    for _ in range(longest):
        allowed = allowed_ids(matcher)
        assert allowed, f"nothing may follow {tokenizer().decode(tokens, skip_special=False)!r}"
        if allowed == [eos] or (eos in allowed and rng.random() < 0.4):
            return tokens, True
        choices = [token for token in allowed if token in singles()] if rng.random() < 0.6 else []
        tokens.append(rng.choice(choices or [token for token in allowed if token != eos]))
        matcher.take(tokens[-1])
    return tokens, False


@cache
def singles() -> frozenset[int]:
    """Tokens of one byte."""
    return frozenset(token for token in range(tokenizer().vocab_size) if len(tokenizer().token(token)) == 1)


def text_of(tokens: list[int]) -> str:
    """Strictly UTF-8, no control token in it."""
    raw = b"".join(bytes(_BYTES[char] for char in tokenizer().token(token)) for token in tokens)
    return raw.decode()


def _byte_table() -> dict[str, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


_BYTES = _byte_table()


@dataclass(frozen=True)
class Case:
    """One generated form of output."""

    kind: str
    value: Any

    @property
    def so_args(self) -> dict[str, Any]:
        return {self.kind: self.value}

    def valid(self, text: str) -> bool:
        if self.kind == "regex":
            return re.fullmatch(self.value, text) is not None
        if self.kind == "json_schema":
            checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
            return jsonschema.Draft202012Validator(self.value, format_checker=checker).is_valid(json.loads(text))
        try:
            lark.Lark(as_lark(self.value), start="root", parser="earley").parse(text)
        except lark.exceptions.LarkError:
            return False
        return True


def cases(count: int, seed: int) -> list[Case]:
    rng = random.Random(seed)
    makers = [("regex", random_regex), ("json_schema", random_schema), ("ebnf", random_ebnf)]
    return [Case(kind, make(rng)) for kind, make in (makers[place % 3] for place in range(count))]


def random_regex(rng: random.Random, depth: int = 0) -> str:
    """Repetitions without end only outermost: nested ones make a mask cost tenths of a second."""
    atoms = ["a", "b", "[a-f]", r"\d", r"\w", r"[^a-z\s]", ".", r"\.", "é", r"\s", "(?:yes|no)", r"\D", "[0-9A-F]{2}"]
    parts = []
    for _ in range(rng.randint(1, 3)):
        atom = rng.choice(atoms)
        if depth < 2 and rng.random() < 0.35:
            branches = "|".join(random_regex(rng, depth + 1) for _ in range(rng.randint(1, 3)))
            atom = f"({branches})"
        often = [""] if atom.endswith("}") else ["", "", "?", "{2}", "{1,3}", *([] if depth else ["+", "*", "+?"])]
        parts.append(atom + rng.choice(often))
    return "".join(parts)


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    scalars = [
        lambda: {"type": "integer", "minimum": rng.randint(-50, 5), "maximum": rng.randint(6, 2000)},
        lambda: {"type": "number", "exclusiveMinimum": rng.choice([0, -1.5]), "maximum": rng.choice([1, 99.25])},
        lambda: {"type": "string", "minLength": rng.randint(0, 2), "maxLength": rng.randint(2, 8)},
        lambda: {"type": "string", "pattern": rng.choice(['^[A-Z]{2}-["\\\\0-9]+$', "a|b$", "^x.y"])},
        lambda: {"type": "string", "format": rng.choice(["date", "time", "ipv4", "uuid", "date-time"])},
        lambda: {"enum": rng.sample(["red", 'a\n"b', 1, 2.5, None, True, {"k": [1]}, "é\u2028"], 3)},
        lambda: {"type": ["boolean", "null"]},
        lambda: {"type": "integer", "multipleOf": rng.choice([2, 7, 10])},
    ]
    if depth >= 3 or rng.random() < 0.4:
        return rng.choice(scalars)()
    return rng.choice([_random_object, _random_array, _random_choice, _random_object])(rng, depth + 1)


def _random_object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(["id", "name", "a b", 'q"', "ü", "tags"], rng.randint(1, 3))
    schema: dict[str, Any] = {"type": "object", "properties": {name: random_schema(rng, depth) for name in names}}
    schema["required"] = [name for name in names if rng.random() < 0.6]
    if rng.random() < 0.2:
        schema["additionalProperties"] = rng.choice([False, {"type": "integer"}])
    if rng.random() < 0.2:
        schema["maxProperties"] = max(1, len(schema["required"]))
    return schema


def _random_array(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(0, 2)
    return {"type": "array", "items": random_schema(rng, depth), "minItems": low, "maxItems": low + rng.randint(0, 2)}


def _random_choice(rng: random.Random, depth: int) -> dict[str, Any]:
    if rng.random() < 0.5:
        return {"anyOf": [random_schema(rng, depth) for _ in range(2)]}
    kinds = [{"type": "string", "maxLength": 3}, {"type": "integer"}, {"type": "array", "items": {"type": "null"}}]
    return {"oneOf": rng.sample(kinds, 2)}


def random_ebnf(rng: random.Random) -> str:
    """Rules r0 (the root) to r3; each refers to later ones only, or to itself between other characters."""
    lines = []
    for number in range(4):
        alternatives = []
        for _ in range(rng.randint(1, 3)):
            items = [rng.choice(['"a"', '"b "', "[0-9]", "[a-fx]", '"\\n"', '"<|"']) for _ in range(rng.randint(1, 2))]
            if number < 3:
                items.append(f"r{rng.randint(number + 1, 3)}" + rng.choice(["", "?", "*"]))
            alternatives.append(" ".join(items))
        if rng.random() < 0.4:
            alternatives.append(f'"(" r{number} ")"')
        lines.append(f"r{number} ::= {' | '.join(alternatives)}")
    return "\n".join(["root ::= r0", *lines])


def as_lark(ebnf: str) -> str:
    """The subset that `random_ebnf` writes, in Lark's notation."""
    return re.sub(r"\[([^\]]*)\]", r"/[\1]/", ebnf.replace("::=", ":"))
