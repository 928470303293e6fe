"""Pass@1 with its uncertainty, and how far two judges agree."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from eval.harness.rollouts import Key
from eval.harness.verdicts import Verdict

Z95 = 1.959963984540054
MOST_LISTED = 100


@dataclass(frozen=True)
class Estimate:
    """A share with its standard error and 95% interval."""

    value: float
    standard_error: float
    low: float
    high: float


def pass_at_1(correct: Sequence[Sequence[bool]]) -> Estimate:
    """The mean over questions of the share of right samples; `correct` holds the samples of each question.

    Questions count as drawn at random and as independent, samples of one question do not: the standard error is that
    of the mean of the questions' shares. The interval is Wilson's for as many independent trials as have this standard
    error, so that it has a width, and stays between 0 and 1, where everything is right or wrong.
    """
    shares = [sum(samples) / len(samples) for samples in correct]
    count, total = len(shares), sum(map(len, correct))
    value = sum(shares) / count
    spread = sum((share - value) ** 2 for share in shares)
    error = math.sqrt(spread / (count - 1) / count) if count > 1 else math.nan
    trials: float = count
    if error > 0:
        trials = min(total, max(1.0, value * (1 - value) / error**2))
    return Estimate(value, error, *_wilson(value, trials))


def _wilson(share: float, trials: float) -> tuple[float, float]:
    squared = Z95**2 / trials
    centre = (share + squared / 2) / (1 + squared)
    half = Z95 / (1 + squared) * math.sqrt(share * (1 - share) / trials + squared / (4 * trials))
    return max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half))


def by_question(verdicts: Mapping[Key, Verdict]) -> list[list[bool]]:
    """The samples of each question that have a verdict."""
    ordered = sorted(key for key, verdict in verdicts.items() if verdict.correct is not None)
    return [[bool(verdicts[key].correct) for key in keys] for _, keys in groupby(ordered, key=lambda key: key[0])]


def agreement(one: Mapping[Key, Verdict], other: Mapping[Key, Verdict]) -> dict[str, Any]:
    """How often two judges say the same about the samples that both judged; Cohen's kappa corrects for chance.

    kappa is None where there is nothing to correct: no sample, or both judges always say the same one thing.
    """
    both = [
        key
        for key in sorted(one.keys() & other.keys())
        if one[key].correct is not None and other[key].correct is not None
    ]
    pairs = [(bool(one[key].correct), bool(other[key].correct)) for key in both]
    same = sum(a == b for a, b in pairs)
    differing = [key for key, (a, b) in zip(both, pairs, strict=True) if a != b]
    return {
        "samples": len(pairs),
        "equal": same,
        "share": same / len(pairs) if pairs else None,
        "kappa": _kappa(pairs, same),
        "differing": [
            {"question": key[0], "sample": key[1], "first": one[key].correct, "second": other[key].correct}
            for key in differing[:MOST_LISTED]
        ],
    }


def _kappa(pairs: Sequence[tuple[bool, bool]], same: int) -> float | None:
    if not pairs:
        return None
    count = len(pairs)
    first, second = (sum(pair[place] for pair in pairs) / count for place in (0, 1))
    chance = first * second + (1 - first) * (1 - second)
    return None if chance == 1 else (same / count - chance) / (1 - chance)
