"""Checks batch invariance: python scripts/check_invariance.py [--model DIR] [--device cuda] [--dtype bfloat16].

Every request runs alone, then all run together in rounds that differ in their order, arrivals, chunks, steps,
slots, pages (with preemption) and loop. The logits that each token was drawn from must be equal to the bit. Should
they not be, or with --operators, a step runs with every operator repeated on some of its rows, and the first that
differs is named. Needs no network. Exits with 0 if all bits agree, else with 1.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from invariance_check.engine_runs import Engines, Setting, difference, random_requests, random_settings
from invariance_check.operators import watched

from deepinfer.checkpoint.locate import resolve_model
from deepinfer.config.envs import read_environment
from deepinfer.core.errors import DeepInferError
from deepinfer.core.request import Request

_ACCELERATORS = {"cpu": "cpu", "cuda": "nvidia"}


def check(engines: Engines, vocabulary: int, options: argparse.Namespace) -> bool:
    """Run and compare everything; print a line a round."""
    requests = random_requests(vocabulary, options.requests, options.longest, options.tokens, options.seed)
    alone = {}
    for request in requests:
        keywords = {"max_num_seqs": 1, "asynchronous": False, "page_size": options.page_size}
        alone |= engines.run(requests, Setting("alone", keywords, (request.index,)))[0]
    print(f"{len(requests)} requests alone: {len(alone)} rows of logits")
    good = True
    for setting in random_settings(options.rounds, requests, options.page_size, options.seed):
        drawn, parts = engines.run(requests, setting)
        worst = [difference(alone[place], drawn[place]) for place in alone]
        wrong = sum(found > 0 for found in worst)
        good &= not wrong
        statistics = parts.scheduler.statistics
        print(
            f"{setting.name}: {wrong} of {len(worst)} rows differ (by up to {max(worst):.3g});"
            f" {statistics.steps} steps, mean {statistics.mean_step:.1f} rows, {statistics.preemptions} preemptions;"
            f" {setting.keywords}",
            flush=True,
        )
    if not good or options.operators:
        good &= _operators(engines, requests, options.page_size)
    return good


def _operators(engines: Engines, requests: Sequence[Request], page_size: int) -> bool:
    found: list[str] = []
    keywords = {"max_num_seqs": len(requests), "asynchronous": False, "page_size": page_size}
    with watched(found):
        engines.run(requests, Setting("operators", keywords, tuple(range(len(requests)))))
    if found:
        print(f"first operator that differs: {found[0]}")
        kinds = sorted({line.split(",")[0] for line in found})
        print(f"{len(found)} differences in all, of: {', '.join(kinds)}")
    else:
        print("no operator differs on parts of its rows")
    return not found


def main(arguments: Sequence[str] | None = None) -> int:
    """Check what the command line names; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="checkpoint directory (default: the bundled one)")
    parser.add_argument("--device", choices=sorted(_ACCELERATORS), default="cpu", help="(%(default)s)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="(%(default)s)")
    parser.add_argument("--requests", type=int, default=12, help="how many (%(default)s)")
    parser.add_argument("--longest", type=int, default=300, help="most prompt tokens (%(default)s)")
    parser.add_argument("--tokens", type=int, default=24, help="most new tokens (%(default)s)")
    parser.add_argument("--rounds", type=int, default=6, help="how often they run together (%(default)s)")
    parser.add_argument("--page-size", type=int, default=16, help="tokens of a page (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and rounds (%(default)s)")
    parser.add_argument("--operators", action="store_true", help="check operator by operator in any case")
    parser.add_argument("--plain", action="store_true", help="without the mode")
    options = parser.parse_args(arguments)
    try:
        settings = {
            "DEEPINFER_ACCELERATOR": _ACCELERATORS[options.device],
            "DEEPINFER_BATCH_INVARIANT": "0" if options.plain else "1",
        }
        directory = Path(resolve_model(options.model))
        engines = Engines(directory, read_environment({**os.environ, **settings}), options.dtype)
        return 0 if check(engines, engines.vocabulary, options) else 1
    except DeepInferError as error:
        print(f"check_invariance.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
