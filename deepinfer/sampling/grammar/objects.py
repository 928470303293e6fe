"""The members of a JSON object as EBNF: declared ones in their order, then others."""

from collections.abc import Sequence
from dataclasses import dataclass

from deepinfer.sampling.grammar.charset import ANY, CharSet
from deepinfer.sampling.grammar.ebnf import Rules, json_literal
from deepinfer.sampling.grammar.spelling import any_of

_PLAIN = ANY - CharSet.of((0, 0x1F)) - CharSet.chars('"\\')
"""What keys besides the declared ones are made of: no escapes, by which one could be spelled another way."""


@dataclass(frozen=True)
class Member:
    """A declared property: its name, the EBNF of its value."""

    name: str
    value: str
    required: bool


@dataclass(frozen=True)
class Members:
    """What an object may hold.

    other: key and value of further members (key None: any name but the `reserved` ones); None: there are none.
    """

    declared: Sequence[Member]
    other: tuple[str | None, str] | None
    reserved: Sequence[str] = ()

    def ebnf(self, rules: Rules, low: int = 0, high: int | None = None) -> str | None:
        """An object of `low` to `high` members (None: any number); None if there is none."""
        return _Chain(self, rules, low, high).ebnf()


class _Chain:
    """Rules (place, members so far), each saying what may follow; counts beyond what matters are one."""

    def __init__(self, members: Members, rules: Rules, low: int, high: int | None) -> None:
        self._members, self._rules = members.declared, rules
        self._low, self._high = low, high
        self._cap = max(low, high or 0, 1)
        self._gap, self._comma = rules.shared("gap"), rules.shared("comma")
        self._colon = rules.shared("colon")
        self._other = self._further(members)
        self._known: dict[tuple[int, int], str | None] = {}

    def ebnf(self) -> str | None:
        for place in range(len(self._members), -1, -1):  # from behind, so that nothing recurses deeply
            for so_far in range(min(place, self._cap) + 1):
                self._known[place, so_far] = self._after(place, so_far)
        inner = self._known[0, 0]
        return None if inner is None else f'"{{" {self._gap} {inner} "}}"'

    def _after(self, place: int, so_far: int) -> str | None:
        if place == len(self._members):
            return self._end(so_far)
        member = self._members[place]
        options = []
        if self._high is None or so_far < self._high:
            rest = self._known[place + 1, min(so_far + 1, self._cap)]
            if rest is not None:
                separator = f"{self._comma} " if so_far else ""
                key = json_literal(member.name)
                options.append(f"{separator}{key} {self._colon} {member.value} {rest}")
        rest = self._known[place + 1, so_far]
        if not member.required and rest is not None:
            options.append(rest)
        return self._rules.rule("members", " | ".join(options)) if options else None

    def _end(self, so_far: int) -> str | None:
        """Further members, and the white space before the brace where there is one."""
        missing = max(0, self._low - so_far)
        room = None if self._high is None else self._high - so_far
        gap, comma, other = self._gap, self._comma, self._other
        if other is None or room == 0:
            return None if missing else gap if so_far else '""'
        if so_far:
            return f"{any_of(self._rules, f'{comma} {other}', missing, room)} {gap}"
        most = None if room is None else room - 1
        filled = f"{other} {any_of(self._rules, f'{comma} {other}', max(0, missing - 1), most)} {gap}"
        return filled if missing else f"({filled})?"

    def _further(self, members: Members) -> str | None:
        if members.other is None:
            return None
        key, value = members.other
        if key is None:
            key = (
                f'"\\"" {other_names(members.reserved, self._rules)} "\\""'
                if members.reserved
                else self._rules.shared("string")
            )
        return self._rules.rule("other", f"{key} {self._colon} {value}")


def other_names(names: Sequence[str], rules: Rules) -> str:
    """EBNF of plain text that is none of `names`: a rule for each of their beginnings."""

    def differing(start: str, tails: list[str]) -> str:
        heads = sorted({tail[0] for tail in tails if tail})
        options = [] if "" in tails else ['""']
        free = _PLAIN - CharSet.chars(heads)
        options.append(f"{free.ebnf()} {_PLAIN.ebnf()}*")
        for head in heads:
            if head in _PLAIN:
                name = differing(start + head, [tail[1:] for tail in tails if tail[:1] == head])
                options.append(f"{CharSet.chars(head).ebnf()} {name}")
        return rules.rule("unlike", " | ".join(options))

    return differing("", list(names))
