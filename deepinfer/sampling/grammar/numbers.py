"""Numbers within bounds as EBNF: digit by digit, so that exactly the numbers within them are spelled.

Bounded numbers are written without an exponent and with at most nine digits behind those of the bound, so that
rounding to binary floating point never carries one over it.
"""

from decimal import Decimal
from typing import NamedTuple

TAIL = 9
ANY_NUMBER = '"-"? ("0" | [1-9] [0-9]*) ("." [0-9]+)? ([eE] [+\\-]? [0-9]+)?'
ANY_INTEGER = '("0" | "-"? [1-9] [0-9]*)'
_SOME = f"[0-9]{{0,{TAIL}}}"
_FRACTION = f'("." [0-9]{{1,{TAIL}}})?'


class Bound(NamedTuple):
    """An end of an interval; `open` if the value itself lies outside."""

    value: Decimal
    open: bool = False


def integers(low: int | None, high: int | None) -> str | None:
    """EBNF of the integers from `low` to `high`, None for no bound; None if there are none."""
    if low is None and high is None:
        return ANY_INTEGER
    parts = []
    if high is None or high >= 0:
        parts.append(_naturals(max(0, low or 0), high))
    if low is None or low < 0:
        negative = _naturals(1 if high is None else max(1, -high), None if low is None else -low)
        parts.append(negative and f'"-" {negative}')
    return _any(parts)


def decimals(low: Bound | None, high: Bound | None) -> str | None:
    """EBNF of the decimal numbers within the bounds; None if there are none."""
    if low is None and high is None:
        return ANY_NUMBER
    zero = Bound(Decimal(0))
    parts = []
    if high is None or high.value >= 0:
        parts.append(_positive(low if low is not None and low.value >= 0 else zero, high))
    if low is None or low.value < 0:
        least = Bound(-high.value, high.open) if high is not None and high.value < 0 else Bound(Decimal(0), True)
        negative = _positive(least, None if low is None else Bound(-low.value, low.open))
        parts.append(negative and f'"-" {negative}')
    return _any(parts)


def multiples(step: int, name: str) -> tuple[str, list[tuple[str, str]]]:
    """EBNF of the integers that `step` divides, and the rules (name, body) it needs, their names begun with `name`."""
    rules = []
    for rest in range(step):
        ends = ['""'] if rest == 0 else []
        rules.append((f"{name}{rest}", " | ".join(ends + _moves(range(10), rest, step, name))))
    return f'("0" | "-"? ({" | ".join(_moves(range(1, 10), 0, step, name))}))', rules


def _moves(digits: range, rest: int, step: int, name: str) -> list[str]:
    """A digit, then the rule of what the number so far leaves when divided."""
    return [f'"{digit}" {name}{(10 * rest + digit) % step}' for digit in digits]


def _naturals(low: int, high: int | None) -> str | None:
    """Integers from low >= 0 to high, without leading zeros."""
    if high is None:
        first = str(low)
        longer = f"[1-9] [0-9]{{{len(first)},}}"
        return _any([_digits(first, "9" * len(first)), longer])
    parts, width = [], len(str(low))
    while low <= high:
        top = min(high, 10**width - 1)
        parts.append(_digits(str(low), str(top)))
        low, width = top + 1, width + 1
    return _any(parts)


def _digits(low: str, high: str) -> str:
    """Digit strings of one length from low to high."""
    if not low:
        return '""'
    if low == "0" * len(low) and high == "9" * len(high):
        return f"[0-9]{{{len(low)}}}"
    a, b, rest = low[0], high[0], len(low) - 1
    if a == b:
        return f'"{a}" {_digits(low[1:], high[1:])}'
    parts = [f'"{a}" {_digits(low[1:], "9" * rest)}', f'"{b}" {_digits("0" * rest, high[1:])}']
    if int(b) - int(a) > 1:
        parts.append(f"{_range(int(a) + 1, int(b) - 1)} [0-9]{{{rest}}}" if rest else _range(int(a) + 1, int(b) - 1))
    return f"({' | '.join(parts)})"


def _positive(low: Bound, high: Bound | None) -> str | None:
    """Numbers >= 0 within bounds >= 0."""
    whole, fraction = _split(low.value)
    if high is None:
        beyond = _naturals(whole + 1, None)
        return _any([_above(whole, fraction, low.open), f"{beyond} {_FRACTION}"])
    last, end = _split(high.value)
    if high.value < low.value or (high.value == low.value and (high.open or low.open)):
        return None
    if whole == last:
        return _within(whole, fraction, end, low.open, high.open)
    between = _naturals(whole + 1, last - 1)
    below = _below(last, end, high.open)
    return _any([_above(whole, fraction, low.open), between and f"{between} {_FRACTION}", below])


def _above(whole: int, fraction: str, open_: bool) -> str | None:
    """Numbers with this whole part that are at least (`open_`: above) whole.fraction."""
    exact = f'"{whole}"' if not fraction and not open_ else None
    return _any([exact, f'"{whole}." {_tail_above(fraction, open_)}'])


def _below(whole: int, fraction: str, open_: bool) -> str | None:
    """Numbers with this whole part that are at most (`open_`: below) whole.fraction."""
    exact = f'"{whole}"' if fraction or not open_ else None
    tail = _tail_below(fraction, open_)
    return _any([exact, tail and f'"{whole}." {tail}'])


def _within(whole: int, low: str, high: str, low_open: bool, high_open: bool) -> str | None:
    """Numbers with this whole part between two fractions."""
    exact = f'"{whole}"' if not low and not low_open and (high or not high_open) else None
    tail = _tail_within(low, high, low_open, high_open)
    return _any([exact, tail and f'"{whole}." {tail}'])


def _tail_above(digits: str, open_: bool) -> str:
    """At least one fraction digit, the fraction at least (`open_`: above) .digits"""
    if not digits:
        return f"[0-9]{{0,{TAIL // 2}}} [1-9] [0-9]{{0,{TAIL // 2}}}" if open_ else f"[0-9]{{1,{TAIL}}}"
    first, rest = int(digits[0]), digits[1:]
    if rest:
        same: str | None = f'"{first}" {_tail_above(rest, open_)}'
    else:
        same = f'"{first}" ({_tail_above("", True)})' if open_ else f'"{first}" {_SOME}'
    return _any([same, f"{_range(first + 1, 9)} {_SOME}" if first < 9 else None]) or ""


def _tail_below(digits: str, open_: bool) -> str | None:
    """At least one fraction digit, the fraction at most (`open_`: below) .digits"""
    if not digits:
        return None if open_ else f'"0"{{1,{TAIL}}}'
    first, rest = int(digits[0]), digits[1:]
    less = f"{_range(0, first - 1)} {_SOME}" if first else None
    if rest:
        tail = _tail_below(rest, open_)
        return _any([less, f'"{first}"', tail and f'"{first}" {tail}'])
    return _any([less, None if open_ else f'"{first}" "0"{{0,{TAIL}}}'])


def _tail_within(low: str, high: str, low_open: bool, high_open: bool) -> str | None:
    """At least one fraction digit, the fraction between .low and .high"""
    if not low:
        below = _tail_below(high, high_open)
        if not low_open:
            return below
        # Above zero and below .high: what `below` says, without the zeros.
        if not high:
            return None
    if not high:
        return None if low or low_open or high_open else f'"0"{{1,{TAIL}}}'
    a, b = int(low[0]) if low else 0, int(high[0])
    if a == b:
        if len(low) <= 1 and len(high) == 1:
            equal = not low_open and not high_open
            return f'"{a}" "0"{{0,{TAIL}}}' if equal else None
        exact = f'"{a}"' if len(low) <= 1 and not low_open and bool(low or a == 0) else None
        tail = _tail_within(low[1:], high[1:], low_open, high_open)
        return _any([exact, tail and f'"{a}" {tail}'])
    above = _tail_above(low[1:], low_open)
    exact = f'"{a}"' if len(low) <= 1 and not low_open else None
    below = _tail_below(high[1:], high_open)
    top = f'"{b}"' if len(high) > 1 or not high_open else None
    middle = f"{_range(a + 1, b - 1)} {_SOME}" if b - a > 1 else None
    return _any([exact, f'"{a}" {above}', middle, top, below and f'"{b}" {below}'])


def _split(value: Decimal) -> tuple[int, str]:
    """The whole part and the digits of the fraction without trailing zeros."""
    whole = int(value)
    text = format(value - whole, "f")
    return whole, text.partition(".")[2].rstrip("0")


def _range(low: int, high: int) -> str:
    return f'"{low}"' if low == high else f"[{low}-{high}]"


def _any(parts: "list[str | None] | list[str]") -> str | None:
    found = [part for part in parts if part]
    return f"({' | '.join(found)})" if found else None
