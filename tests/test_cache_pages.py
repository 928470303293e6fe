"""The page manager: every page in one state, nothing handed out twice, only unused pages evicted."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from deepinfer.cache.pages import PageManager


class Kept:
    """A manager and what it evicted, with a hook that forgets what it is told to."""

    def __init__(self, total: int) -> None:
        self.evicted: list[int] = []
        self.manager = PageManager(total, self._evict)

    def _evict(self, pages: list[int]) -> None:
        self.evicted += pages
        for page in pages:
            self.manager.forget(page)

    def take(self, count: int) -> list[int]:
        pages = self.manager.allocate(count)
        assert pages is not None
        return pages

    def idle(self, count: int) -> list[int]:
        """Take pages, keep them for their content and release them together."""
        pages = self.take(count)
        for page in pages:
            self.manager.keep(page)
        self.manager.release(pages)
        return pages


def test_all_pages_begin_free_and_come_out_once() -> None:
    manager = Kept(5).manager
    assert (manager.free, manager.idle, manager.available) == (5, 0, 5)
    assert sorted([*(manager.allocate(2) or []), *(manager.allocate(3) or [])]) == [0, 1, 2, 3, 4]
    assert manager.available == 0


def test_too_many_pages_change_nothing() -> None:
    kept = Kept(4)
    kept.idle(2)
    assert kept.manager.allocate(5) is None
    assert (kept.manager.free, kept.manager.idle, kept.evicted) == (2, 2, [])


def test_no_pages_are_no_failure() -> None:
    manager = Kept(1).manager
    assert manager.allocate(1) == [0]
    assert manager.allocate(0) == []


def test_a_page_is_free_after_its_last_holder() -> None:
    manager = Kept(2).manager
    pages = manager.allocate(1) or []
    manager.share(pages)
    manager.release(pages)
    assert (manager.holders(pages[0]), manager.free) == (1, 1)
    manager.release(pages)
    assert (manager.holders(pages[0]), manager.free) == (0, 2)


def test_free_pages_go_before_idle_ones() -> None:
    kept = Kept(4)
    idle = kept.idle(2)
    assert not set(kept.take(2)) & set(idle)
    assert kept.evicted == []


def test_the_longest_idle_are_evicted_first_and_ends_before_beginnings() -> None:
    kept = Kept(6)
    first, second = kept.idle(3), kept.idle(2)
    kept.take(1)
    kept.take(2)
    assert kept.evicted == [first[2], first[1]]
    kept.take(3)
    assert kept.evicted == [*reversed(first), *reversed(second)]


def test_sharing_an_idle_page_saves_it() -> None:
    kept = Kept(3)
    first, second = kept.idle(1), kept.idle(1)
    kept.manager.share(first)
    kept.take(2)
    assert kept.evicted == second
    assert kept.manager.allocate(1) is None
    kept.manager.release(first)
    assert kept.manager.is_idle(first[0])


def test_a_used_page_is_never_evicted() -> None:
    kept = Kept(3)
    pages = kept.take(2)
    kept.manager.keep(pages[0])
    assert kept.manager.allocate(2) is None
    assert kept.manager.allocate(1) is not None
    assert kept.evicted == []


def test_forgetting_a_used_page_only_drops_its_content() -> None:
    kept = Kept(2)
    pages = kept.take(1)
    kept.manager.keep(pages[0])
    kept.manager.forget(pages[0])
    assert kept.manager.holders(pages[0]) == 1
    kept.manager.release(pages)
    assert kept.manager.free == 2


@pytest.mark.parametrize("misuse", ["share", "release", "keep"])
def test_misuse_of_a_free_page(misuse: str) -> None:
    manager = Kept(2).manager
    with pytest.raises(ValueError, match="page 1"):
        manager.keep(1) if misuse == "keep" else getattr(manager, misuse)([1])
    manager.check_integrity()


def test_a_hook_that_evicts_more_than_it_was_told() -> None:
    """Pages that follow an evicted one go with it; they are free then."""
    manager = PageManager(4, lambda pages: [manager.forget(page) for page in list(manager.kept)] and None)
    pages = manager.allocate(4) or []
    for page in pages:
        manager.keep(page)
    manager.release(pages)
    assert manager.allocate(1) is not None
    assert (manager.free, manager.idle) == (3, 0)


@pytest.mark.parametrize("fault", ["lost", "twice", "negative", "no content"])
def test_integrity_faults_are_found(fault: str) -> None:
    manager = Kept(3).manager
    manager.allocate(1)
    if fault == "lost":
        manager._free.pop()
    elif fault == "twice":
        manager._free.append(0)
    elif fault == "negative":
        manager._holders[0] = -1
    else:
        manager._kept.add(2)
    with pytest.raises(RuntimeError):
        manager.check_integrity()


class PageMachine(RuleBasedStateMachine):
    """Holders come and go at random; a plain count of everything is kept beside the manager."""

    TOTAL = 7

    def __init__(self) -> None:
        super().__init__()
        self.manager = PageManager(self.TOTAL, self._evict)
        self.holders: list[list[int]] = []
        self.kept: set[int] = set()

    def _evict(self, pages: list[int]) -> None:
        used = {page for pages in self.holders for page in pages}
        for page in pages:
            assert page in self.kept, "evicted a page without content"
            assert page not in used, "evicted a page in use"
            self.kept.remove(page)
            self.manager.forget(page)

    def idle(self) -> set[int]:
        return self.kept - {page for pages in self.holders for page in pages}

    @rule(count=st.integers(0, TOTAL + 1))
    def allocate(self, count: int) -> None:
        used = {page for pages in self.holders for page in pages}
        pages = self.manager.allocate(count)
        if pages is None:
            assert count > self.TOTAL - len(used)
            return
        assert len(set(pages)) == count
        assert not set(pages) & used, "handed out twice"
        assert not set(pages) & self.kept, "handed out with content"
        self.holders.append(pages)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        pages = data.draw(st.sampled_from(self.holders))
        self.manager.share(pages)
        self.holders.append(list(pages))

    @precondition(lambda self: self.idle())
    @rule(data=st.data())
    def share_idle(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.idle())))
        self.manager.share([page])
        self.holders.append([page])

    @precondition(lambda self: any(self.holders))
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted({page for pages in self.holders for page in pages})))
        self.manager.keep(page)
        self.kept.add(page)

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.kept)))
        self.manager.forget(page)
        self.kept.remove(page)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        pages = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        self.manager.release(pages)

    @invariant()
    def accounts_agree(self) -> None:
        self.manager.check_integrity()
        count = Counter(page for pages in self.holders for page in pages)
        assert [self.manager.holders(page) for page in range(self.TOTAL)] == [count[page] for page in range(self.TOTAL)]
        assert self.manager.kept == self.kept
        assert set(self.manager.idle_pages()) == self.idle()
        assert self.manager.free == self.TOTAL - len(count) - len(self.idle())

    def teardown(self) -> None:
        for pages in self.holders:
            self.manager.release(pages)
        self.holders = []
        assert self.manager.available == self.TOTAL
        assert sorted(self.manager.allocate(self.TOTAL) or []) == list(range(self.TOTAL))


TestPageMachine = PageMachine.TestCase
TestPageMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
