"""A small world around the KV manager, in which every page's content is known and every use of it is checked."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from deepinfer.cache.disk import DiskTier
from deepinfer.cache.manager import KVManager
from deepinfer.cache.tiers import HostTier, Tier

SIZE = 2
PAGES = 9
GARBAGE = "garbage"


@dataclass
class Running:
    """A request: its tokens, its pages, and how many of these are written and published."""

    tokens: str
    pages: list[int]
    written: int


class World:
    """Requests over a pool of a few pages, a host tier of a few pages and a disk tier of a few files.

    The device is a list: a page holds the whole text up to its end, since its KV depends on all of it. So a hit can be
    checked: whatever happened before, its pages hold the beginning of the request's text.
    """

    def __init__(self, folder: Path, host_budget: int = 12, disk_budget: int = 900) -> None:
        self.folder, self.host_budget, self.disk_budget = folder, host_budget, disk_budget
        self.device = [GARBAGE] * PAGES
        self.running: dict[int, Running] = {}
        self.number = 0
        self._start()

    def _start(self) -> None:
        tiers: list[Tier] = [HostTier(self.host_budget), DiskTier(self.folder, "model", self.disk_budget)]
        self.kv = KVManager(PAGES, SIZE, "model", self, tiers)

    def read_pages(self, pages: Sequence[int]) -> list[bytes]:
        """What goes to the tiers: pages that somebody wrote and nobody holds."""
        held = self.held()
        for page in pages:
            assert self.device[page] != GARBAGE, "an unwritten page would be kept"
            assert page not in held, "a page in use goes to the tiers"
        return [self.device[page].encode() for page in pages]

    def held(self) -> set[int]:
        """Pages that requests hold."""
        return {page for request in self.running.values() for page in request.pages}

    def admit(self, tokens: str, spare: int = 0, may_hit: bool = True, fails: bool = False) -> None:
        """Start a request; with `fails` the step that would fill its pages from a tier goes wrong."""
        self.number += 1
        before, needed = self.kv.available_pages, -(-len(tokens) // SIZE)
        admitted = self.kv.admit(self.number, tokens, len(tokens), spare=spare, may_hit=may_hit)
        if admitted is None:
            assert self.kv.available_pages == before, "a refusal changed something"
            assert before - needed < spare, "refused although all its pages could have been fresh"
            return
        assert self.kv.available_pages >= spare
        hit, loaded = admitted.hit_tokens // SIZE, [load.page for load in admitted.loads]
        assert hit * SIZE == admitted.hit_tokens < len(tokens)
        assert len(set(admitted.pages)) == len(admitted.pages) == needed
        assert loaded == list(admitted.pages[hit - len(loaded) : hit])
        self._take_over([*admitted.pages[hit:], *loaded])
        if fails and loaded:
            self.kv.release(self.number)
            return
        for load in admitted.loads:
            assert isinstance(load.data, bytes)
            self.device[load.page] = load.data.decode()
        for place in range(hit):
            assert self.device[admitted.pages[place]] == tokens[: (place + 1) * SIZE], "a hit is not what it should be"
        self.running[self.number] = Running(tokens, list(admitted.pages), hit)

    def generate(self, number: int, more: str) -> None:
        """Let a request grow, if there are pages."""
        request, before = self.running[number], self.kv.available_pages
        tokens = request.tokens + more
        needed = -(-len(tokens) // SIZE) - len(request.pages)
        new = self.kv.extend(number, len(tokens))
        if new is None:
            assert before < needed
            return
        assert len(new) == needed
        self._take_over(new)
        request.tokens = tokens
        request.pages += new

    def write(self, number: int, last: int) -> None:
        """Write a request's pages before number `last` and publish them."""
        request = self.running[number]
        users = [page for other in self.running.values() for page in other.pages]
        for place in range(request.written, last):
            assert users.count(request.pages[place]) == 1, "a shared page would be written"
            self.device[request.pages[place]] = request.tokens[: (place + 1) * SIZE]
        self.kv.publish(number, request.tokens[request.written * SIZE : last * SIZE])
        request.written = last

    def release(self, number: int) -> None:
        """End a request."""
        self.kv.release(number)
        del self.running[number]

    def files(self) -> list[Path]:
        """The disk tier's files."""
        return sorted(self.folder.rglob("*.page"))

    def restart(self, gracefully: bool) -> None:
        """End the process, with or without its leave, and begin another one."""
        for number in list(self.running):
            self.release(number)
        if gracefully:
            self.kv.persist()
        self.device = [GARBAGE] * PAGES
        self._start()

    def check(self) -> None:
        """No page is lost, and none is held that should not be."""
        self.kv.check_integrity()
        for number, request in self.running.items():
            assert self.kv.pages_of(number) == tuple(request.pages)
            for place in range(request.written):
                assert self.device[request.pages[place]] == request.tokens[: (place + 1) * SIZE], "content was lost"
        assert self.kv.available_pages == PAGES - len(self.held())

    def close(self) -> None:
        """After everything is released all pages can be had."""
        for number in list(self.running):
            self.release(number)
        assert self.kv.available_pages == PAGES
        everything = self.kv.admit(-1, "?" * SIZE * PAGES, SIZE * PAGES)
        assert everything is not None
        assert sorted(everything.pages) == list(range(PAGES))

    def _take_over(self, fresh: list[int]) -> None:
        assert not set(fresh) & self.held(), "a page in use was handed out"
        for page in fresh:
            self.device[page] = GARBAGE


def damage(file: Path, kind: str, at: int) -> None:
    """Flip a bit of byte `at` of a file, cut the file there, or remove it."""
    content = bytearray(file.read_bytes())
    if kind == "remove":
        file.unlink()
    elif content:
        content[at % len(content)] ^= 1
        file.write_bytes(content[: at % len(content)] if kind == "cut" else content)
