"""How texts are spelled in the output, as EBNF: one character of a set, and many.

xgrammar knows beforehand which tokens a place of a rule allows as long as a token stays in the rule or in rules that it
leads down to. Tokens that might leave a rule in their middle it tries one by one, whenever a mask is filled; that takes
a thousand times longer with a large vocabulary. So what is repeated here is a character class, or a chain of
rules each of which ends with the next one. And no rule repeats anything more than `BLOCK` times: behind more than 128
repetitions xgrammar's masks allow tokens that it does not take.
"""

from collections.abc import Callable
from typing import Protocol

from deepinfer.sampling.grammar.charset import CharSet
from deepinfer.sampling.grammar.ebnf import Rules, json_escaped, json_raw

BLOCK = 32
"""Most repetitions of anything within a rule: fewer compile sooner, more leave fewer tokens to be tried."""

MOST_IN_EBNF = 128
"""Repetitions that xgrammar writes out, so that its masks are right."""

Few = Callable[[int, int | None], str]
"""EBNF of something `low` to `high` times, both at most `BLOCK`; high None: any number."""


class Spelling(Protocol):
    """Spells characters in one kind of text, with the rules that this takes in `rules`."""

    rules: Rules

    def one(self, chars: CharSet) -> str:
        """EBNF of one character of a set that is not empty."""

    def many(self, chars: CharSet, low: int, high: int | None) -> str:
        """EBNF of `low` to `high` of them; None: any number."""


class PlainText:
    """Text as it is."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules

    def one(self, chars: CharSet) -> str:
        """EBNF of one character of a set that is not empty."""
        return chars.ebnf()

    def many(self, chars: CharSet, low: int, high: int | None) -> str:
        """EBNF of `low` to `high` of them; None: any number."""
        return repeated(self.rules, lambda least, most: times(chars.ebnf(), least, most), low, high)


class JsonText:
    """Text between the quotes of a JSON string: raw where JSON lets it, else escaped."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self._chains: dict[tuple[str, str, int, int | None], str] = {}

    def one(self, chars: CharSet) -> str:
        """EBNF of one character of a set that is not empty."""
        parts = (json_raw(chars), json_escaped(chars, self.rules))
        return f"({' | '.join(part for part in parts if part)})"

    def many(self, chars: CharSet, low: int, high: int | None) -> str:
        """EBNF of `low` to `high` of them; None: any number."""
        raw, escaped = json_raw(chars), json_escaped(chars, self.rules)
        if not raw or not escaped:
            return repeated(self.rules, lambda least, most: times(f"{raw or escaped}", least, most), low, high)
        return repeated(self.rules, lambda least, most: self._chain(raw, escaped, least, most), low, high)

    def _chain(self, raw: str, escaped: str, low: int, high: int | None) -> str:
        """A rule a character, each of which ends with the next one."""
        following = f"{raw}* ({escaped} {raw}*)*"
        if high is None and not low:
            return following
        if high == 0:
            return '""'
        key = raw, escaped, low, high
        if key not in self._chains:
            rest = self.rules.rule("chars", following) if high is None else ""
            last = low if high is None else high
            for place in range(last - 1, -1, -1):
                ways = [f"{raw} {rest}".strip(), f"{escaped} {rest}".strip()]
                rest = self.rules.rule("chars", " | ".join(['""', *ways] if place >= low else ways))
            self._chains[key] = rest
        return self._chains[key]


def repeated(rules: Rules, few: Few, low: int, high: int | None) -> str:
    """EBNF of what `few` repeats `low` to `high` times (None: any number): more than `BLOCK` times as blocks of it."""
    if low <= BLOCK and (high is None or high <= BLOCK):
        return few(low, high)
    block = rules.rule("block", few(BLOCK, BLOCK))

    def blocks(least: int, most: int) -> str:
        return repeated(rules, lambda a, b: times(block, a, b), least, most)

    whole, least = divmod(low, BLOCK)
    lead = f"{blocks(whole, whole)} " if whole else ""
    if high is None:
        return f"{lead}{few(least, None)}"
    most, rest = divmod(high - whole * BLOCK, BLOCK)
    if not most:
        return f"{lead}{few(least, rest)}"
    ways = [few(least, BLOCK)]
    if most > 1:
        ways.append(f"{blocks(1, most - 1)} {few(0, BLOCK)}")
    ways.append(f"{blocks(most, most)} {few(0, rest)}" if rest else blocks(most, most))
    return f"{lead}({' | '.join(ways)})"


def any_of(rules: Rules, item: str, low: int, high: int | None) -> str:
    """EBNF of any `item` `low` to `high` times; None: any number."""
    item = f"({item})"
    if low > BLOCK or (high or 0) > BLOCK:
        item = rules.rule("item", item)
    return repeated(rules, lambda least, most: times(item, least, most), low, high)


def times(item: str, low: int, high: int | None) -> str:
    """EBNF of an `item` (a class, a rule, or something in parentheses) `low` to `high` times."""
    if high == 0:
        return '""'
    if (low, high) == (1, 1):
        return item
    short = {(0, None): "*", (1, None): "+", (0, 1): "?"}
    return item + short.get((low, high), f"{{{low},{'' if high is None else high}}}")
