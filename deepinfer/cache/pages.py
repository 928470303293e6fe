"""Who uses which page: free list, reference counts, and the cached pages that nobody uses at the moment."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence


class PageManager:
    """Numbers 0 .. total-1, each in one state: free, used (by one or more holders), or idle.

    An idle page is kept for its content: it has no holder, but somebody may share it again. Idle pages are handed out
    as well, the longest idle first, once the free ones are gone; `evict` is called with them just before, must `forget`
    them, and may read them one last time.
    """

    def __init__(self, total: int, evict: Callable[[list[int]], None]) -> None:
        """All pages begin free."""
        self.total = total
        self._evict = evict
        self._free = list(range(total - 1, -1, -1))
        self._holders = [0] * total
        self._kept: set[int] = set()
        self._idle: OrderedDict[int, None] = OrderedDict()  # longest idle first

    @property
    def free(self) -> int:
        """Pages without holder and content."""
        return len(self._free)

    @property
    def idle(self) -> int:
        """Pages without holder that are kept for their content."""
        return len(self._idle)

    @property
    def available(self) -> int:
        """Pages that `allocate` could hand out now."""
        return len(self._free) + len(self._idle)

    @property
    def kept(self) -> frozenset[int]:
        """Pages kept for their content, used or idle."""
        return frozenset(self._kept)

    def holders(self, page: int) -> int:
        """How many hold the page."""
        return self._holders[page]

    def is_idle(self, page: int) -> bool:
        """Whether the page is kept and nobody holds it."""
        return page in self._idle

    def idle_pages(self) -> list[int]:
        """The idle pages, longest idle first."""
        return list(self._idle)

    def allocate(self, count: int) -> list[int] | None:
        """Hand out `count` pages with one holder each; None, and nothing changes, if fewer are available."""
        if count > self.available:
            return None
        short = count - len(self._free)
        if short > 0:
            self._evict([page for page, _ in zip(self._idle, range(short), strict=False)])
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add a holder to each page, which must be used or idle."""
        for page in pages:
            if not self._holders[page] and page not in self._idle:
                raise ValueError(f"page {page} is free; only a used or an idle page can be shared")
            self._holders[page] += 1
            self._idle.pop(page, None)

    def release(self, pages: Sequence[int]) -> None:
        """Take a holder from each page; without any, a page becomes idle if it is kept and else free.

        The last of `pages` counts as idle for longest: of a request's pages those at its end go first, since a page
        is of use only to requests that share all pages before it too.
        """
        for page in reversed(pages):
            if not self._holders[page]:
                raise ValueError(f"page {page} has no holder; it was released twice")
            self._holders[page] -= 1
            if not self._holders[page]:
                self._rest(page)

    def keep(self, page: int) -> None:
        """Keep a used page for its content from now on."""
        if not self._holders[page]:
            raise ValueError(f"page {page} has no holder; only a used page can be kept")
        self._kept.add(page)

    def forget(self, page: int) -> None:
        """Stop keeping a page for its content; without a holder it becomes free."""
        self._kept.remove(page)
        if page in self._idle:
            del self._idle[page]
            self._free.append(page)

    def check_integrity(self) -> None:
        """Raise RuntimeError unless every page is in exactly one state."""
        free, used = set(self._free), {page for page, holders in enumerate(self._holders) if holders > 0}
        idle = set(self._idle)
        if len(free) != len(self._free) or free & used or free & idle or used & idle:
            raise RuntimeError("a page is in two states at once")
        if len(free) + len(used) + len(idle) != self.total or min(self._holders, default=0) < 0:
            raise RuntimeError("a page is lost")
        if not idle <= self._kept or free & self._kept:
            raise RuntimeError("a page is idle without content, or free with content")

    def _rest(self, page: int) -> None:
        if page in self._kept:
            self._idle[page] = None
        else:
            self._free.append(page)
