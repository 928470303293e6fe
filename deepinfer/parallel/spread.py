"""Which rank serves a request: the one that will be done with it first, what it has cached taken into account."""

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

DECODE_COST = 8.0
"""What a generated token costs in prompt tokens: it runs both halves of the model, in smaller steps."""
_REMEMBERED = 1 << 20


@dataclass(frozen=True)
class Job:
    """keys: content of the prompt's tokens. new_tokens: how many it may generate."""

    keys: Sequence[Hashable]
    new_tokens: int


class Spreader:
    """Sends requests to ranks, and remembers which prefixes they have read. One call at a time."""

    def __init__(self, ranks: int, page_size: int, remembered: int = _REMEMBERED) -> None:
        """Prefixes count by whole pages; of each rank the last `remembered` pages are known."""
        self._page_size, self._remembered = page_size, remembered
        self._known: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in range(ranks)]

    def spread(self, jobs: Sequence[Job]) -> list[int]:
        """A rank for each job. The largest jobs choose first, each the rank whose load then grows to the least."""
        loads = [0.0] * len(self._known)
        chosen = [0] * len(jobs)
        sizes = [len(job.keys) + DECODE_COST * job.new_tokens for job in jobs]
        for index in sorted(range(len(jobs)), key=lambda place: -sizes[place]):
            pages = list(_pages(jobs[index].keys, self._page_size))
            ends = [(load + sizes[index] - self._cached(rank, pages), rank) for rank, load in enumerate(loads)]
            load, rank = min(ends)
            loads[rank], chosen[index] = load, rank
            self._remember(rank, pages)
        return chosen

    def _cached(self, rank: int, pages: Sequence[bytes]) -> int:
        """Tokens of the longest prefix of whole pages that the rank has read."""
        known = self._known[rank]
        count = next((place for place, page in enumerate(pages) if page not in known), len(pages))
        return count * self._page_size

    def _remember(self, rank: int, pages: Sequence[bytes]) -> None:
        known = self._known[rank]
        for page in pages:
            known[page] = None
            known.move_to_end(page)
        while len(known) > self._remembered:
            known.popitem(last=False)


def _pages(keys: Sequence[Hashable], size: int) -> Iterator[bytes]:
    """A digest of each prefix of whole pages."""
    digest = b""
    for end in range(size, len(keys) + 1, size):
        digest = blake2b(digest + repr(tuple(keys[end - size : end])).encode(), digest_size=16).digest()
        yield digest
