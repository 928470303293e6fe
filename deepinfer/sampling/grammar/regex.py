"""Python regular expressions as EBNF, matched whole or, as JSON Schema has it, anywhere in a string.

What is generated always matches by Python's `re`: classes such as \\d and \\w give their ASCII characters, their
complements leave out whatever `re` counts among them in all of Unicode.
"""

import re
import re._constants as op  # type: ignore[import-not-found]
import re._parser as parser  # type: ignore[import-not-found]
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from deepinfer.core.errors import RequestError
from deepinfer.sampling.grammar import charset
from deepinfer.sampling.grammar.charset import ANY, NOTHING, CharSet
from deepinfer.sampling.grammar.ebnf import Rules
from deepinfer.sampling.grammar.spelling import PlainText, Spelling, any_of

MOST_REPEATS = 100_000
_REFUSED = {
    op.ASSERT: "lookahead or lookbehind",
    op.ASSERT_NOT: "negative lookahead or lookbehind",
    op.GROUPREF: "a backreference",
    op.GROUPREF_EXISTS: "a conditional group",
    op.ATOMIC_GROUP: "an atomic group",
    op.POSSESSIVE_REPEAT: "a possessive quantifier",
}
_BEGIN, _END = (op.AT_BEGINNING, op.AT_BEGINNING_STRING), (op.AT_END, op.AT_END_STRING)


class UnsupportedError(RequestError):
    """A regex that is valid but says more than a grammar can."""


def whole(pattern: str, spelling: Spelling) -> str:
    """EBNF of the strings that `re.fullmatch` finds; RequestError for no regex, or one that no grammar expresses."""
    tree = _parse(pattern)
    return _written(pattern, lambda: _Writer(pattern, tree.state.flags, spelling).sequence(tree, True, True))


def anywhere(pattern: str, spelling: Spelling) -> str:
    """EBNF of the strings in which `re.search` finds the pattern."""
    tree = _parse(pattern)
    return _written(pattern, lambda: _Writer(pattern, tree.state.flags, spelling).search(tree))


def grammar(pattern: str) -> str:
    """A whole grammar of the strings that `re.fullmatch` finds."""
    rules = Rules()
    return rules.text(whole(pattern, PlainText(rules)))


def _written(pattern: str, write: Callable[[], str]) -> str:
    try:
        return write()
    except RecursionError as error:
        raise RequestError(f"{pattern!r:.80} nests its groups too deeply; it takes a simpler regex") from error


def _parse(pattern: str) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of syntax that later versions of Python may read differently
            re.compile(pattern)
            tree = parser.parse(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise RequestError(f"{pattern!r:.80} is no regular expression: {error}") from error
    if tree.state.flags & (re.IGNORECASE | re.MULTILINE | re.LOCALE):
        raise UnsupportedError(
            f"{pattern!r:.80} sets a flag that no grammar expresses; the flags s, x, a and u may be set"
        )
    return tree


class _Writer:
    """Writes the parse tree of one pattern as EBNF."""

    def __init__(self, pattern: str, flags: int, spelling: Spelling) -> None:
        self._pattern, self._spelling = pattern, spelling
        self._dotall = bool(flags & re.DOTALL)

    def sequence(self, items: Sequence[Any], first: bool, last: bool) -> str:
        """Items in a row; `first`, `last`: whether they begin and end the text, so that anchors there say nothing."""
        items = list(items)
        while first and items and items[0][0] is op.AT and items[0][1] in _BEGIN:
            del items[0]
        while last and items and items[-1][0] is op.AT and items[-1][1] in _END:
            del items[-1]
        ends = len(items) - 1
        parts = [self._item(kind, value, first and not i, last and i == ends) for i, (kind, value) in enumerate(items)]
        return " ".join(parts) or '""'

    def search(self, items: Sequence[Any]) -> str:
        """Items in a row with any text around them where no anchor forbids it."""
        items = list(items)
        if len(items) == 1 and items[0][0] is op.BRANCH:
            return "(" + " | ".join(self.search(branch) for branch in items[0][1][1]) + ")"
        if len(items) == 1 and items[0][0] is op.SUBPATTERN:
            return self.search(items[0][1][3])
        begins = bool(items) and items[0][0] is op.AT and items[0][1] in _BEGIN
        ends = bool(items) and items[-1][0] is op.AT and items[-1][1] in _END
        around = self._spelling.many(ANY, 0, None)
        inner = self.sequence(items, begins, ends)
        return " ".join(part for part in ("" if begins else around, inner, "" if ends else around) if part)

    def _item(self, kind: Any, value: Any, first: bool, last: bool) -> str:
        if kind in _REFUSED:
            raise self._refused(_REFUSED[kind])
        if kind is op.AT:
            raise self._refused("an anchor inside, or a word boundary")
        if kind is op.BRANCH:
            return "(" + " | ".join(self.sequence(branch, first, last) for branch in value[1]) + ")"
        if kind is op.SUBPATTERN:
            return self._group(value, first, last)
        if kind in (op.MAX_REPEAT, op.MIN_REPEAT):
            return self._repeat(*value)
        return self._spelling.one(self._some(self._chars(kind, value)))

    def _group(self, value: Any, first: bool, last: bool) -> str:
        _, added, removed, items = value
        if added or removed:
            raise self._refused("a flag inside a group")
        return f"({self.sequence(items, first, last)})"

    def _repeat(self, least: int, most: Any, items: Sequence[Any]) -> str:
        high = None if most is op.MAXREPEAT else int(most)
        if max(least, high or 0) > MOST_REPEATS:
            raise self._refused(f"a repetition beyond {MOST_REPEATS}")
        kind, value = items[0] if len(items) == 1 else (None, None)
        if kind in (op.LITERAL, op.NOT_LITERAL, op.ANY, op.IN):
            return self._spelling.many(self._some(self._chars(kind, value)), least, high)
        return any_of(self._spelling.rules, self.sequence(items, False, False), least, high)

    def _chars(self, kind: Any, value: Any) -> CharSet:
        if kind is op.LITERAL:
            return CharSet.of((value, value))
        if kind is op.NOT_LITERAL:
            return ~CharSet.of((value, value))
        if kind is op.ANY:
            return ANY if self._dotall else ~CharSet.chars("\n")
        if kind is op.IN:
            return self._members(value)
        raise self._refused(str(kind).lower())

    def _members(self, members: Sequence[Any]) -> CharSet:
        negated = members[0][0] is op.NEGATE
        found = NOTHING
        for kind, value in members[negated:]:
            if kind is op.CATEGORY:
                found |= _category(str(value), outer=negated)
            else:
                found |= CharSet.of((value, value) if kind is op.LITERAL else value)
        return ~found if negated else found

    def _some(self, chars: CharSet) -> CharSet:
        if not chars:
            raise self._refused("a class that no character is in")
        return chars

    def _refused(self, what: str) -> UnsupportedError:
        return UnsupportedError(f"{self._pattern!r:.80} has {what}, which no grammar expresses")


def _category(name: str, outer: bool) -> CharSet:
    """The characters that \\d, \\w, \\s or a complement surely (or, `outer`, possibly) stands for."""
    inner_sets = {"DIGIT": charset.DIGITS, "WORD": charset.WORD, "SPACE": charset.SPACE}
    outer_sets = {"DIGIT": charset.unicode_digits, "WORD": charset.unicode_word, "SPACE": charset.unicode_space}
    complement, kind = "_NOT_" in name, name.rsplit("_", 1)[-1]
    chars = outer_sets[kind]() if outer != complement else inner_sets[kind]
    return ~chars if complement else chars
