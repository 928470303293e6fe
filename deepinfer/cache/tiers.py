"""Slower places for pages that the device has no room for: host memory, then whatever lies below it."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Protocol

Entry = tuple[bytes, bytes]
"""(digest of a page, its bytes)."""


class Tier(Protocol):
    """Keeps pages by digest within a budget of its own; only the KV manager calls it. No method fails: a tier that
    cannot serve or store a page warns and goes on without it.
    """

    name: str

    def __contains__(self, digest: object) -> bool:
        """Whether the page seems to be here; `get` decides."""

    def get(self, digest: bytes) -> bytes | None:
        """The page's bytes, checked, or None; it counts as used now."""

    def put(self, digest: bytes, data: bytes) -> Sequence[Entry]:
        """Store a page as used now; returns what has to go elsewhere for lack of room."""

    def drain(self) -> Sequence[Entry]:
        """All pages that would be lost with the process, the least recently used first."""


class HostTier:
    """Pages in host memory, up to `budget` bytes; the least recently used leave first."""

    name = "host"

    def __init__(self, budget: int) -> None:
        self._room = budget
        self._pages: OrderedDict[bytes, bytes] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, digest: object) -> bool:
        return digest in self._pages

    def get(self, digest: bytes) -> bytes | None:
        """Return the page's bytes or None."""
        if digest in self._pages:
            self._pages.move_to_end(digest)
        return self._pages.get(digest)

    def put(self, digest: bytes, data: bytes) -> list[Entry]:
        """Store a page; returns those that leave for it, or itself if it is larger than all room."""
        self._room += len(self._pages.pop(digest, b"")) - len(data)
        self._pages[digest] = data
        leaving = []
        while self._room < 0:
            leaving.append(self._pages.popitem(last=False))
            self._room += len(leaving[-1][1])
        return leaving

    def drain(self) -> list[Entry]:
        """Return all pages."""
        return list(self._pages.items())


class TierStack:
    """Tiers from fast to slow, as one: what one has no room for goes to the next, and beyond the last it is gone."""

    def __init__(self, tiers: Iterable[Tier] = ()) -> None:
        self._tiers = tuple(tiers)

    def __bool__(self) -> bool:
        return bool(self._tiers)

    def __contains__(self, digest: object) -> bool:
        return any(digest in tier for tier in self._tiers)

    def get(self, digest: bytes) -> tuple[bytes, str] | None:
        """The page's bytes and the name of the first tier that has it."""
        for tier in self._tiers:
            data = tier.get(digest)
            if data is not None:
                return data, tier.name
        return None

    def put(self, digest: bytes, data: bytes) -> None:
        """Store a page in the fastest tier."""
        self._put([(digest, data)], self._tiers)

    def persist(self) -> None:
        """Copy what would be lost with the process to the tiers below."""
        for place, tier in enumerate(self._tiers):
            below = self._tiers[place + 1 :]
            self._put([entry for entry in tier.drain() if not any(entry[0] in lower for lower in below)], below)

    def _put(self, entries: Sequence[Entry], tiers: Sequence[Tier]) -> None:
        for tier in tiers:
            entries = [leaving for digest, data in entries for leaving in tier.put(digest, data)]
