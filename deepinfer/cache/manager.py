"""The one owner of global KV pages: which request holds which, and what content others may share."""

import warnings
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from deepinfer.cache.layout import check_page_size
from deepinfer.cache.lookup import fetch_below
from deepinfer.cache.pages import PageManager
from deepinfer.cache.prefix import MODE_FORBIDS, Match, Node, PrefixTree
from deepinfer.cache.statistics import CacheStatistics
from deepinfer.cache.tiers import Tier, TierStack
from deepinfer.core.plan import Admitted, PageLoad


class PageReader(Protocol):
    """Copies pages out of the device; `Caches` is one."""

    def read_pages(self, pages: Sequence[int]) -> list[bytes]:
        """The bytes of each page. The steps that wrote them have come back; one that does not may be running."""


@dataclass(slots=True)
class _Holding:
    """The pages of one request, in order; the tree was told of the first `shown` of them.

    keys: content of the pages that are or may be shown. node: where the tree goes on.
    """

    pages: list[int]
    node: Node
    shown: int
    keys: list[Hashable] = field(default_factory=list)


class KVManager:
    """Hands out pages to requests and finds those that already hold what a request begins with.

    Host data only. A page goes from free to held by a request; once the request publishes its content, others share it;
    when the last holder releases it, it stays idle until pages run out, the least recently released first. With tiers,
    an idle page that is taken for something else goes down to them, and its content can come back.
    """

    def __init__(
        self,
        pages: int,
        page_size: int,
        identity: str,
        reader: PageReader | None = None,
        tiers: Iterable[Tier] = (),
    ) -> None:
        """`identity` names all that decides what a page holds beside the tokens: model, formats, page size.

        `tiers`, fast ones first, keep what `reader` reads; without one they are not used. Raises ConfigError for a bad
        page size.
        """
        check_page_size(page_size)
        self.page_size = page_size
        self.statistics = CacheStatistics()
        self._pages = PageManager(pages, self._evict)
        self._tree = PrefixTree(page_size, identity)
        self._reader = reader
        self._tiers = TierStack(tiers if reader is not None else ())
        self._holdings: dict[int, _Holding] = {}

    @property
    def total_pages(self) -> int:
        """Pages there are."""
        return self._pages.total

    @property
    def available_pages(self) -> int:
        """Pages that requests could take now: free ones and idle ones."""
        return self._pages.available

    @property
    def idle_pages(self) -> int:
        """Pages that no request holds but that still have content to share."""
        return self._pages.idle

    def pages_of(self, request_id: int) -> tuple[int, ...]:
        """All pages that a request holds, in order."""
        return tuple(self._holdings[request_id].pages)

    def admit(
        self, request_id: int, keys: Sequence[Hashable], tokens: int, *, spare: int = 0, may_hit: bool = True
    ) -> Admitted | None:
        """Take pages for the first `tokens` tokens of a request whose prompt's content is `keys`, one a token.

        Shared pages that hold the start of `keys` come first (whole pages, at most all but the last of `tokens` tokens;
        none unless `may_hit`), then pages to be filled from tiers, then fresh ones. None, and nothing changes, unless
        `spare` pages stay available.
        """
        if request_id in self._holdings:
            raise ValueError(f"request {request_id} holds pages already")
        limit = min(tokens, len(keys)) - 1 if may_hit else 0
        match = self._tree.match(keys, limit) if may_hit else Match((), self._tree.root, MODE_FORBIDS)
        fresh = self._pages_for(tokens) - len(match.pages)
        if self._pages.available - sum(map(self._pages.is_idle, match.pages)) - fresh < spare:
            return None
        fetched = fetch_below(self._tree, self._tiers, match, keys, limit)
        self._pages.share(match.pages)
        taken = self._take(fresh)
        hit = (len(match.pages) + len(fetched.data)) * self.page_size
        pages = [*match.pages, *taken]
        self._holdings[request_id] = _Holding(pages, match.node, len(match.pages), list(keys[:hit]))
        self.statistics.admitted(len(keys), hit, fetched)
        loads = (PageLoad(page, data) for page, data in zip(taken, fetched.data, strict=False))
        return Admitted(tuple(pages), hit, fetched.miss, tuple(loads))

    def extend(self, request_id: int, tokens: int) -> list[int] | None:
        """Take fresh pages until the request's pages hold `tokens` tokens; returns the new ones.

        None, and nothing changes, if there are not enough.
        """
        holding = self._holdings[request_id]
        fresh = max(0, self._pages_for(tokens) - len(holding.pages))
        pages = self._pages.allocate(fresh)
        if pages is not None:
            holding.pages += pages
        return pages

    def publish(self, request_id: int, keys: Sequence[Hashable]) -> None:
        """Let others share the request's next whole pages: their tokens, with the content `keys`, are written.

        The first call goes on where the hit ended, each further call where the last one did. It also says that pages
        from tiers are filled; until then they are the request's own.
        """
        holding = self._holdings[request_id]
        if len(keys) % self.page_size or len(holding.keys) + len(keys) > len(holding.pages) * self.page_size:
            raise ValueError(f"request {request_id}: {len(keys)} tokens are not whole pages that it holds")
        holding.keys += keys
        self._show(holding)

    def release(self, request_id: int) -> None:
        """Take back all pages of a request: no step in flight uses them any more."""
        self._pages.release(self._holdings.pop(request_id).pages)

    def persist(self) -> None:
        """Copy the content of all idle pages to the tiers, as far down as it goes: a disk tier survives a restart."""
        self._store([(page, self._tree.digest(page)) for page in self._pages.idle_pages()])
        self._tiers.persist()

    def check_integrity(self) -> None:
        """Raise RuntimeError unless every page is accounted for exactly once for each holder."""
        self._pages.check_integrity()
        self._tree.check_integrity()
        holders = [0] * self.total_pages
        for holding in self._holdings.values():
            for page in holding.pages:
                holders[page] += 1
        if holders != [self._pages.holders(page) for page in range(self.total_pages)]:
            raise RuntimeError("reference counts and holdings differ")
        if self._pages.kept != self._tree.pages():
            raise RuntimeError("kept pages and the tree's pages differ")

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _take(self, count: int) -> list[int]:
        pages = self._pages.allocate(count)
        if pages is None:
            raise RuntimeError(f"{count} pages were to be available and are not")
        return pages

    def _show(self, holding: _Holding) -> None:
        """Tell the tree of the holding's pages, as far as their content is known."""
        if not holding.node.attached:  # another request's page that this one stood on was evicted: start over with ours
            holding.node, holding.shown = self._tree.root, 0
        start = holding.shown * self.page_size
        for chunk in self._tree.chunks(holding.keys, len(holding.keys), start):
            page = holding.pages[holding.shown]
            holding.node = self._tree.add(holding.node, chunk, page)
            if holding.node.page == page:
                self._pages.keep(page)
            holding.shown += 1

    def _evict(self, pages: list[int]) -> None:
        """Forget idle pages that are about to be handed out, and what follows them; the tiers keep their content."""
        gone = [entry for page in pages for entry in self._tree.remove(page)]
        self._store([(page, digest) for page, digest in gone if self._pages.is_idle(page)])
        for page, _ in gone:
            self._pages.forget(page)
        self.statistics.evicted_pages += len(gone)

    def _store(self, entries: Sequence[tuple[int, bytes]]) -> None:
        """Copy pages, given with their digests, to the tiers; what cannot be read is lost to them alone."""
        missing = [(page, digest) for page, digest in entries if digest not in self._tiers]
        if not self._tiers or self._reader is None or not missing:
            return
        try:
            found = self._reader.read_pages([page for page, _ in missing])
        except Exception as error:
            warnings.warn(
                f"{len(missing)} pages could not be copied to the cache's tiers: {error}", RuntimeWarning, stacklevel=2
            )
            return
        for (_, digest), data in zip(missing, found, strict=True):
            self._tiers.put(digest, data)
        self.statistics.stored_pages += len(missing)
