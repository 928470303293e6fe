"""Bounds and divisors: exactly the numbers within them are spelled."""

import random
import re
from decimal import Decimal

import pytest

from deepinfer.sampling.grammar.numbers import TAIL, Bound, decimals, integers, multiples


def as_regex(ebnf: str) -> re.Pattern[str]:
    """The EBNF of numbers uses only what a regex can say as well."""
    plain = re.sub(r'"([^"]*)"', lambda quoted: f"(?:{re.escape(quoted[1])})", ebnf)
    return re.compile(plain.replace(" ", ""))


def test_integers_within_bounds() -> None:
    rng = random.Random(1)
    for _ in range(200):
        low, high = (rng.choice([None, rng.randrange(-1500, 1500)]) for _ in range(2))
        ebnf = integers(low, high)
        inside = [n for n in range(-1600, 1600) if (low is None or n >= low) and (high is None or n <= high)]
        if ebnf is None:
            assert not inside
            continue
        pattern = as_regex(ebnf)
        assert [n for n in range(-1600, 1600) if pattern.fullmatch(str(n))] == inside
        assert not pattern.fullmatch("-0")
        assert not pattern.fullmatch("007")


def test_decimals_within_bounds() -> None:
    rng = random.Random(2)
    for _ in range(400):
        low, high = random_bound(rng), random_bound(rng)
        ebnf = decimals(low, high)
        if ebnf is None:
            assert low is not None
            assert high is not None
            assert low.value >= high.value
            continue
        pattern = as_regex(ebnf)
        for value in candidates(rng, low, high):
            text = format(value, "f")
            if text.startswith("-") and not value:
                continue
            assert bool(pattern.fullmatch(text)) == within(value, low, high), (low, high, text)


def random_bound(rng: random.Random) -> Bound | None:
    values = [Decimal(rng.randrange(-3000, 3000)).scaleb(-rng.randrange(4)), Decimal(rng.randrange(-3, 3)).scaleb(-1)]
    return rng.choice([None, *(Bound(value, rng.random() < 0.5) for value in values)])


def within(value: Decimal, low: Bound | None, high: Bound | None) -> bool:
    above = low is None or value > low.value or (value == low.value and not low.open)
    below = high is None or value < high.value or (value == high.value and not high.open)
    return above and below


def candidates(rng: random.Random, low: Bound | None, high: Bound | None) -> list[Decimal]:
    found = [Decimal(rng.randrange(-4000, 4000)).scaleb(-rng.randrange(5)) for _ in range(30)]
    steps = ("0", "0.1", "-0.1", "0.001", "-0.001", "0.0001", "-0.0001", "1", "-1")
    found += [bound.value + Decimal(step) for bound in (low, high) if bound is not None for step in steps]
    return [value.normalize() for value in found]


def test_a_bound_is_not_crossed_by_rounding_to_binary() -> None:
    ebnf = decimals(Bound(Decimal("3.5"), True), None)
    assert ebnf is not None
    pattern = as_regex(ebnf)
    assert pattern.fullmatch("3.5" + "0" * (TAIL // 2) + "1")
    assert not pattern.fullmatch("3.5" + "0" * 20 + "1")
    assert float("3.5" + "0" * (TAIL // 2) + "1") > 3.5


@pytest.mark.parametrize("step", [1, 2, 3, 7, 10, 60, 100])
def test_multiples(step: int) -> None:
    root, rules = multiples(step, "m")
    moves = {name: dict(re.findall(r'"(\d)" (m\d+)', body)) for name, body in rules}
    start = dict(re.findall(r'"(\d)" (m\d+)', root))

    def spelled(number: int) -> bool:
        digits = str(abs(number))
        if digits == "0":
            return True
        state = start.get(digits[0])
        for digit in digits[1:]:
            state = moves[state][digit]
        return state == "m0"

    assert all(spelled(number) == (number % step == 0) for number in range(-500, 500))
    assert dict(rules)["m0"].startswith('"" |')
