"""The number formats as lists of values, for tests: rounding by search, in exact arithmetic."""

import math

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
"""Non-negative E2M1 values by code."""

E4M3 = [
    (code % 8) * 2.0**-9 if code < 8 else (1 + code % 8 / 8) * 2.0 ** (code // 8 - 7)
    for code in range(127)  # code 127 is NaN
]
"""Non-negative E4M3 values by code."""


def nearest(value: float, levels: list[float]) -> float:
    """The closest of +-levels to `value`, the even code on a tie; the sign of zero is kept."""
    magnitude = abs(value)
    code = min(range(len(levels)), key=lambda code: (abs(levels[code] - magnitude), code % 2))
    return math.copysign(levels[code], value)


def power_of_two(value: float) -> float:
    """The smallest power of two >= value > 0."""
    mantissa, exponent = math.frexp(value)
    return math.ldexp(1.0, exponent - 1 if mantissa == 0.5 else exponent)
