#!/usr/bin/env python3
"""How evenly context parallel spreads a prompt's work: `python scripts/cp_balance.py` prints doc/parallel.md's table.

For prompts of several lengths, read in one step or in steps of 8,192 rows a rank, and for 2, 4 and 8 ranks: the rank
with the most work of attention and index over the mean (ranks wait for each other, so it counts step by step), if every
rank gets as many rows, one after the other, and as `deepinfer.parallel.context` cuts them; and the most rows over the
mean, which is the same of all other work.
"""

import argparse

import numpy as np

from deepinfer.config.released import released_config
from deepinfer.core.plan import Span
from deepinfer.parallel.context import RowWork, cut_rows

RANKS = (2, 4, 8)
STEP = 8192


def span(first: int, end: int) -> Span:
    return Span(0, 0, first, end - first, (), 0, 0, 0, 0, False)


def balance(work: RowWork, length: int, step: int, ranks: int) -> tuple[float, float, float]:
    """Most over mean: work in contiguous stretches of equally many rows, work as cut, rows as cut."""
    most = np.zeros(3)
    for first in range(0, length, step):
        end = min(first + step, length)
        costs = work(np.arange(first, end))
        equal = [int(part.sum()) for part in np.array_split(costs, ranks)]
        shares = cut_rows([span(first, end)], ranks, work)
        cut = [sum(int(costs[one.first - first : one.end - first].sum()) for _, one in share) for share in shares]
        rows = [sum(one.count for _, one in share) for share in shares]
        most += [max(equal), max(cut), max(rows) * (int(costs.sum()) / (end - first))]
    total = int(work(np.arange(length)).sum())
    return most[0] * ranks / total, most[1] * ranks / total, most[2] * ranks / total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 131072, 1048576], help="tokens of the prompts")
    options = parser.parse_args()
    work = RowWork(released_config())
    print("| prompt | read in | ranks | equal rows | as cut | rows as cut |")
    print("|---|---|---|---|---|---|")
    for length in options.lengths:
        for steps in ("one step", f"steps of {STEP:,} a rank"):
            for ranks in RANKS:
                step = length if steps == "one step" else STEP * ranks
                if steps != "one step" and step >= length:
                    continue
                cells = " | ".join(f"{value:.3f}" for value in balance(work, length, step, ranks))
                print(f"| {length:,} | {steps} | {ranks} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
