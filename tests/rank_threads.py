"""Ranks as threads of one process, for what needs nothing but their exchanges."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed

from deepinfer.parallel.collectives import Collectives

dist: Any = torch.distributed
Result = TypeVar("Result")


def run_ranks(size: int, work: Callable[[Collectives], Result]) -> list[Result]:
    """What `work` returns on each of `size` ranks."""
    store = dist.HashStore()

    def one(rank: int) -> Result:
        collectives = Collectives(store, rank, size, torch.device("cpu"), True, timedelta(seconds=60))
        return work(collectives)

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(one, range(size)))
