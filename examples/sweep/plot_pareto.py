#!/usr/bin/env python3
"""Draws what a sweep found: speed of a GPU against what a user or a step waits for.

    python examples/sweep/plot_pareto.py sweeps/*/results.jsonl [--out sweeps]

Prefill: tokens/s/GPU against milliseconds a step. Decode: tokens/s/GPU against tokens/s/user. A line a model and
context; the bound, where a run has one, is drawn dashed. Writes prefill.svg and decode.svg, and prints the points as
a table. Needs matplotlib (the extra `plot`).
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Point:
    """One run. x, y: the axes of its mode. bound: y of the bound, if there is one."""

    mode: str
    series: str
    size: int
    x: float
    y: float
    bound: float | None


def point(run: dict[str, Any]) -> Point | None:
    """The point of one line of results; None for a mode that is not drawn."""
    series = f"{run.get('model') or 'default model'}, context {run.get('context_length', 0):,}"
    if run.get("mode") == "prefill" and "prefill" in run:
        made = run["prefill"]
        bound = made.get("bound_tokens_per_s")
        return Point("prefill", series, run["prefill_batch_size"], made["ms_per_step"], made["tokens_per_s"], bound)
    if run.get("mode") == "decode" and "decode" in run:
        made, requests = run["decode"], run["decode_num_requests"]
        bound = made.get("bound_ms_per_step")
        user = made["tokens_per_s"] / requests  # with drafts, several tokens a step
        most = None if bound is None else 1e3 / bound * made["tokens_per_s"] / made["avg_SPS"]
        return Point("decode", series, requests, user, made["tokens_per_s"], most)
    return None


def read(paths: Sequence[Path]) -> list[Point]:
    """The points of result files, smallest size first. Raises ValueError for a line that is no result."""
    found = []
    for path in paths:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            try:
                made = point(json.loads(line)) if line.strip() else None
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"{path}:{number}: is no result of a sweep ({error!r})") from error
            if made is not None:
                found.append(made)
    return sorted(found, key=lambda one: (one.mode, one.series, one.size))


AXES = {
    "prefill": ("ms a step", "tokens/s/GPU"),
    "decode": ("tokens/s/user", "tokens/s/GPU"),
}


def draw(points: Sequence[Point], mode: str, target: Path) -> None:
    """One picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines: dict[str, list[Point]] = defaultdict(list)
    for one in points:
        lines[one.series].append(one)
    figure, axes = pyplot.subplots(figsize=(6.4, 4.2))
    for series, own in lines.items():
        (drawn,) = axes.plot([one.x for one in own], [one.y for one in own], marker="o", label=series)
        for one in own:
            axes.annotate(f"{one.size:,}", (one.x, one.y), textcoords="offset points", xytext=(4, 5), fontsize=7)
        if all(one.bound is not None for one in own):
            bounds = [one.bound or 0.0 for one in own]
            axes.plot([one.x for one in own], bounds, linestyle="--", color=drawn.get_color(), alpha=0.5)
    axes.set_xlabel(AXES[mode][0])
    axes.set_ylabel(AXES[mode][1])
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(target)
    pyplot.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", help="results.jsonl of sweeps")
    parser.add_argument("--out", type=Path, default=Path("sweeps"), help="folder for the pictures (default: sweeps)")
    options = parser.parse_args(arguments)
    try:
        points = read(options.results)
    except (OSError, ValueError) as error:
        print(f"plot_pareto.py: {error}", file=sys.stderr)
        return 2
    if not points:
        print("plot_pareto.py: no prefill or decode results in these files", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    for mode, (across, up) in AXES.items():
        own = [one for one in points if one.mode == mode]
        if not own:
            continue
        target = options.out / f"{mode}.svg"
        draw(own, mode, target)
        print(f"{target}\n{'series':40} {'size':>8} {across:>14} {up:>14} {'bound':>10}")
        for one in own:
            bound = f"{one.bound:10,.0f}" if one.bound is not None else ""
            print(f"{one.series:40} {one.size:8,} {one.x:14,.1f} {one.y:14,.0f} {bound}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
