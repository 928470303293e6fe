#!/usr/bin/env python3
"""Checks and times balanced context parallel on one device: ranks are threads, or take turns.

    DEEPINFER_ACCELERATOR=nvidia python scripts/check_context.py --model released --ep_slice 8     # one GPU
    python scripts/check_context.py --context 2048 --rows 512                                 # a CPU, bundled model

1. Ranks that share the steps of a prompt leave the same in their caches, to the byte; and about what one rank leaves
   that runs all: the share of equal bytes by layer. Sums in another order move values over rounding ties, and every
   layer adds to it, so a random model's late layers agree less.
2. Time of each rank's part of a step, the parts one after the other, with a copy of its own rows in place of those that
   others would send: the slowest over the mean, and what one rank takes over the slowest.

Exit status 1 if ranks differ, or if one rank's first layers do.
"""

import argparse
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from benchmarking.group import Turns, padded
from benchmarking.rig import Rig, Shape, make_rig

from deepinfer.cache.storage import Caches
from deepinfer.config.released import RELEASED
from deepinfer.core.plan import Span
from deepinfer.parallel.context import RowWork, share_rows

START = time.perf_counter()
LEAST_EQUAL = 0.9
"""Share of equal bytes in the first layer's windows; a fault leaves one in many equal."""


class Threads:
    """The end of one of several ranks in one process: what `share_rows` needs of `Collectives`."""

    def __init__(self, rank: int, size: int, board: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size, self._board, self._barrier = rank, size, board, barrier

    def gather(self, rows: Tensor, most: int) -> Tensor:
        """All ranks' rows, padded to `most`."""
        self._board[self.rank] = padded(rows, most)
        self._barrier.wait()
        gathered = torch.cat(self._board)
        self._barrier.wait()
        return gathered


def steps_of(rig: Rig, length: int, rows: int) -> list[Span]:
    """A prompt of `length` tokens in steps of `rows`."""
    ids = rig.admit(0, length).token_ids
    ends = [*range(rows, length, rows), length]
    return [
        rig.span(0, end - min(rows, end), ids[end - min(rows, end) : end], 0, length, end == length) for end in ends
    ]


def run(rig: Rig, span: Span, caches: Caches, group: Any) -> None:
    batch = rig.runner.batch([span])
    if group is not None:
        rings = caches.ring, caches.pairs.shape[2]
        batch = share_rows(batch, [span], RowWork(rig.config), rings, group)
    rig.model.step(batch, caches)


def check(rig: Rig, ranks: int, length: int, rows: int) -> bool:
    device, table = rig.device, rig.caches.page_table
    made = [
        Caches(rig.config, rig.caches.pages, rig.caches.slots, rig.caches.page_size, device=device)
        for _ in range(ranks + 1)
    ]
    for caches in made:
        caches.page_table.copy_(table)
    steps = steps_of(rig, length, rows)
    board: list[Any] = [None] * ranks
    barrier = threading.Barrier(ranks)

    @torch.inference_mode()
    def play(rank: int) -> None:
        try:
            for span in steps:
                run(rig, span, made[rank], Threads(rank, ranks, board, barrier))
        except BaseException:
            traceback.print_exc()
            barrier.abort()  # nobody waits for a rank that has failed
            raise

    for span in steps:  # first, so that kernels are built before threads need them
        run(rig, span, made[-1], None)
    rig.synchronize()
    print(f"kernels are built after {time.perf_counter() - START:.0f} s", flush=True)
    with ThreadPoolExecutor(ranks) as pool:
        list(pool.map(play, range(ranks)))
    same = all(
        equal(one, other) == 1.0
        for caches in made[1:-1]
        for one, other in zip(kept(made[0]), kept(caches), strict=True)
    )
    layers = [equal(one, other) for one, other in zip(made[0].windows, made[-1].windows, strict=True)]
    sources = [equal(one, other) for one, other in zip(kept(made[0])[2:], kept(made[-1])[2:], strict=True)]
    print(f"{ranks} ranks, {length:,} tokens in steps of {rows:,}: ranks {'agree to the byte' if same else 'DIFFER'}")
    print(f"  equal bytes with one rank: windows by layer {shares(layers[: rig.config.decoder_start])}")
    print(f"  latents and index keys by source {shares(sources)}", flush=True)
    return same and layers[0] >= LEAST_EQUAL


def kept(caches: Caches) -> list[Tensor]:
    return [caches.windows, caches.history, *caches.latents, *caches.index_keys]


def equal(one: Tensor, other: Tensor) -> float:
    return float((one == other).float().mean()) if one.numel() else 1.0


def shares(values: list[float]) -> str:
    return " ".join(f"{value:.2f}" for value in values)


def median_seconds(rig: Rig, work: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats + 1):
        rig.synchronize()
        begin = time.perf_counter()
        work()
        rig.synchronize()
        times.append(time.perf_counter() - begin)
    return sorted(times[1:])[repeats // 2]


def time_steps(rig: Rig, context: int, rows: int, sizes: list[int], repeats: int) -> None:
    print("\n| step | ranks | slowest rank, ms | mean, ms | slowest / mean | one rank / slowest |")
    print("|---|---|---|---|---|---|")
    steps = steps_of(rig, context, rows)
    for name, span in (("first", steps[0]), ("last", steps[-1])):
        alone = 0.0
        for ranks in sizes:
            groups = [Turns(rank, ranks) if ranks > 1 else None for rank in range(ranks)]
            taken = [median_seconds(rig, partial(run, rig, span, rig.caches, group), repeats) for group in groups]
            slowest, mean = max(taken), sum(taken) / ranks
            alone = alone or mean
            cells = f"{1e3 * slowest:.1f} | {1e3 * mean:.1f} | {slowest / mean:.3f} | {alone / slowest:.2f}"
            print(f"| {name} {span.count:,} of {context:,} | {ranks} | {cells} |", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="'released' for the released shape with random weights; none: the bundled one")
    parser.add_argument("--ep_slice", type=int, default=1, help="one rank's share of the experts of so many")
    parser.add_argument("--context", type=int, default=131072, help="tokens of the prompt whose steps are timed")
    parser.add_argument("--rows", type=int, default=8192, help="rows of a step")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8], help="sizes of groups to time")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    shape = Shape(options.model, options.model == RELEASED, options.ep_slice, 1 << 20, 64, graphs=False)
    with torch.inference_mode():
        rig = make_rig(shape, 1, options.context)
        print(f"weights are there after {time.perf_counter() - START:.0f} s", flush=True)
        short = min(options.context, 3 * options.rows // 4)
        good = check(rig, 2, short, options.rows // 4)
        time_steps(rig, options.context, options.rows, options.ranks, options.repeats)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
