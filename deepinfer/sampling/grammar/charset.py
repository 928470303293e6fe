"""Sets of characters (Unicode scalar values) and how EBNF spells them."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

Range = tuple[int, int]

_SURROGATES = (0xD800, 0xDFFF)
_TOP = 0x10FFFF


@dataclass(frozen=True)
class CharSet:
    """Characters as disjoint ascending ranges, both ends included; surrogates are no characters."""

    ranges: tuple[Range, ...]

    @classmethod
    def of(cls, *ranges: Range) -> "CharSet":
        """The union of any ranges."""
        merged: list[Range] = []
        for low, high in sorted(_scalars(ranges)):
            if merged and low <= merged[-1][1] + 1:
                merged[-1] = merged[-1][0], max(merged[-1][1], high)
            else:
                merged.append((low, high))
        return cls(tuple(_scalars(merged)))

    @classmethod
    def chars(cls, text: Iterable[str]) -> "CharSet":
        """Exactly the characters of `text`."""
        return cls.of(*((ord(char), ord(char)) for char in text))

    def __bool__(self) -> bool:
        return bool(self.ranges)

    def __or__(self, other: "CharSet") -> "CharSet":
        return CharSet.of(*self.ranges, *other.ranges)

    def __and__(self, other: "CharSet") -> "CharSet":
        return ~(~self | ~other)

    def __sub__(self, other: "CharSet") -> "CharSet":
        return self & ~other

    def __invert__(self) -> "CharSet":
        gaps, start = [], 0
        for low, high in self.ranges:
            if low > start:
                gaps.append((start, low - 1))
            start = high + 1
        if start <= _TOP:
            gaps.append((start, _TOP))
        return CharSet.of(*gaps)

    def __contains__(self, char: str) -> bool:
        return any(low <= ord(char) <= high for low, high in self.ranges)

    def ebnf(self) -> str:
        """An EBNF character class; ValueError for the empty set, which EBNF cannot say."""
        if not self.ranges:
            raise ValueError("no character is in this set")
        return "[" + "".join(_char(a) if a == b else f"{_char(a)}-{_char(b)}" for a, b in self.ranges) + "]"


def _scalars(ranges: Iterable[Range]) -> Iterable[Range]:
    """Cut surrogates out."""
    first, last = _SURROGATES
    for low, high in ranges:
        if low < first:
            yield low, min(high, first - 1)
        if high > last:
            yield max(low, last + 1), high
        # what lies between is dropped


def _char(code: int) -> str:
    char = chr(code)
    if char.isascii() and char.isalnum():
        return char
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


ANY = CharSet.of((0, _TOP))
NOTHING = CharSet(())
DIGITS = CharSet.of((0x30, 0x39))
WORD = CharSet.of((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
SPACE = CharSet.chars(" \t\n\r\f\v")


@cache
def unicode_digits() -> CharSet:
    """What Python's \\d matches in text."""
    return CharSet.chars(char for char in map(chr, range(_TOP + 1)) if char.isdecimal())


@cache
def unicode_word() -> CharSet:
    """What Python's \\w matches in text."""
    return CharSet.chars(char for char in map(chr, range(_TOP + 1)) if char.isalnum() or char == "_")


@cache
def unicode_space() -> CharSet:
    """What Python's \\s matches in text, and what ECMAScript adds."""
    return CharSet.chars(char for char in map(chr, range(_TOP + 1)) if char.isspace() or char == "\ufeff")


def literal(text: str) -> str:
    """An EBNF string literal of text without lone surrogates."""
    plain = "".join(
        char if char.isascii() and char.isprintable() and char not in '"\\' else _char(ord(char)) for char in text
    )
    return f'"{plain}"'
