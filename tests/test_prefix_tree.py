"""The prefix tree: what it finds, why it finds no more, and what goes when a page goes."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.cache import prefix
from deepinfer.cache.content import page_digest, root_digest
from deepinfer.cache.prefix import PrefixTree

SIZE = 4


def tree_with(*contents: str, identity: str = "model") -> PrefixTree:
    """A tree that knows texts; each letter is a token, pages are numbered as they come."""
    tree = PrefixTree(SIZE, identity)
    for text in contents:
        insert(tree, text)
    return tree


def insert(tree: PrefixTree, keys: Sequence[Any]) -> list[int]:
    """Tell the tree of all whole pages of `keys`; returns where their content is."""
    node, pages = tree.root, []
    for chunk in tree.chunks(keys, len(keys)):
        node = tree.add(node, chunk, len(tree) + 100)
        pages.append(node.page)
    return pages


def found(tree: PrefixTree, keys: str) -> tuple[tuple[int, ...], str | None]:
    match = tree.match(keys, len(keys) - 1)
    return match.pages, match.miss


def test_finds_whole_pages_of_what_it_knows() -> None:
    tree = tree_with("aaaabbbbcccc")
    assert found(tree, "aaaabbbbccccd") == ((100, 101, 102), None)
    assert found(tree, "aaaabbbbcccc") == ((100, 101), None), "the last token must run"
    assert found(tree, "aaaabbbb?") == ((100, 101), None)


@pytest.mark.parametrize(
    ("keys", "pages", "miss"),
    [
        ("zzzzz", 0, "first seen"),
        ("aaaaz", 1, None),
        ("aaazz", 0, "differs at token 3"),
        ("azzzz", 0, "differs at token 1"),
        ("aaaabbzzz", 1, "differs at token 6"),
        ("aaaazzzzz", 1, "differs at token 4"),
        ("aaaabbbbccccddddd", 3, "first seen"),
        ("aaaa", 0, "too short"),
        ("a", 0, "too short"),
    ],
)
def test_says_why_a_hit_ends(keys: str, pages: int, miss: str | None) -> None:
    tree = tree_with("aaaabbbbcccc")
    assert found(tree, keys) == (tuple(range(100, 100 + pages)), miss)


def test_the_closest_sibling_explains_the_difference() -> None:
    tree = tree_with("aaaaxxxx", "aaaabbxx", "aaaabxxx")
    assert found(tree, "aaaabbbbb")[1] == "differs at token 6"


def test_an_empty_tree_has_seen_nothing() -> None:
    assert found(tree_with(), "aaaaa") == ((), "first seen")


def test_branches_share_their_beginning() -> None:
    tree = tree_with("aaaabbbb", "aaaacccc")
    assert len(tree) == 3
    assert found(tree, "aaaabbbb?")[0] == (100, 101)
    assert found(tree, "aaaacccc?")[0] == (100, 102)


def test_the_first_page_of_a_content_stays() -> None:
    tree = tree_with("aaaa")
    node = tree.add(tree.root, tuple("aaaa"), 7)
    assert node.page == 100
    assert 7 not in tree


def test_removing_a_page_takes_what_follows_it() -> None:
    tree = tree_with("aaaabbbbcccc", "aaaabbbbdddd", "aaaaeeee")
    gone = tree.remove(101)
    assert sorted(page for page, _ in gone) == [101, 102, 103]
    assert tree.pages() == {100, 104}
    assert found(tree, "aaaabbbb?") == ((100,), "evicted")
    assert found(tree, "aaaaeeee?") == ((100, 104), None)
    tree.check_integrity()


def test_removed_pages_come_with_their_digests() -> None:
    tree = tree_with("aaaabbbb")
    first = page_digest(root_digest("model"), tuple("aaaa"))
    assert tree.digest(100) == first
    assert tree.remove(100) == [(100, first), (101, page_digest(first, tuple("bbbb")))]


def test_removing_an_unknown_page_does_nothing() -> None:
    tree = tree_with("aaaa")
    assert tree.remove(5) == []
    assert found(tree, "aaaa?") == ((100,), None)


def test_a_removed_node_is_detached_and_its_content_can_return() -> None:
    tree = tree_with("aaaa")
    node = tree.match("aaaa?", 4).node
    assert node.attached
    tree.remove(100)
    assert not node.attached
    assert found(tree, "aaaab") == ((), "evicted")
    insert(tree, "aaaa")
    assert found(tree, "aaaab") == ((100,), None)
    tree.remove(100)
    assert found(tree, "aaaab") == ((), "evicted")


def test_only_so_many_evictions_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix, "_EVICTED_REMEMBERED", 2)
    tree = tree_with("aaaa", "bbbb", "cccc")
    for page in (100, 101, 102):
        tree.remove(page)
    assert found(tree, "aaaa?")[1] == "first seen"
    assert found(tree, "bbbb?")[1] == "evicted"


def test_images_match_by_content_and_place() -> None:
    tree = PrefixTree(SIZE, "model")
    insert(tree, [1, ("cat", 0), ("cat", 1), 2])
    assert tree.match([1, ("cat", 0), ("cat", 1), 2, 3], 4).pages == (100,)
    assert tree.match([1, ("dog", 0), ("dog", 1), 2, 3], 4).miss == "differs at token 1"
    assert tree.match([1, ("cat", 1), ("cat", 0), 2, 3], 4).pages == ()


def test_digests_tell_apart_models_prefixes_and_kinds_of_keys() -> None:
    root = root_digest("model")
    contents: list[list[Any]] = [[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, ("4", 0)], [1, 2, 3, "4"], [4, 3, 2, 1]]
    digests = {page_digest(root, keys) for keys in contents}
    digests |= {page_digest(page_digest(root, [0]), contents[0]), page_digest(root_digest("other"), contents[0])}
    assert len(digests) == len(contents) + 2
    assert page_digest(root, [1, 2, 3, 4]) == page_digest(root_digest("model"), (1, 2, 3, 4))


def test_digests_are_the_same_in_every_process() -> None:
    """They name files: the very bytes, so that a change of the encoding is noticed and the format version raised."""
    text = page_digest(root_digest("m"), [1, 2])
    image = page_digest(root_digest("m"), [("abc", 0), 7])
    assert text.hex() == "4242d1bab2cc7e5304a372fcca2d43bcb2bde1bb37265c3e21fda72b28fd422e"
    assert image.hex() == "a833ce040e289e81e520d19a7c31e04ac689bcf6fbfd7344ebfa7ee5378f21c5"


@pytest.mark.parametrize("fault", ["index", "place", "twice"])
def test_integrity_faults_are_found(fault: str) -> None:
    tree = tree_with("aaaabbbb")
    node = tree.match("aaaa?", 4).node
    if fault == "index":
        del tree._nodes[101]
    elif fault == "place":
        node.keys = tuple("zzzz")
    else:
        node.page = 101
    with pytest.raises(RuntimeError):
        tree.check_integrity()


texts = st.lists(st.text("ab", min_size=0, max_size=10), max_size=12)


@settings(max_examples=300, deadline=None)
@given(contents=texts, removals=st.lists(st.integers(0, 30), max_size=3), query=st.text("ab", max_size=10))
def test_agrees_with_a_search_through_all_texts(contents: list[str], removals: list[int], query: str) -> None:
    tree = PrefixTree(2, "model")
    known: set[str] = set()
    for number, text in enumerate(contents):
        node = tree.root
        for end, chunk in enumerate(tree.chunks(text, len(text)), start=1):
            node = tree.add(node, chunk, number * 10 + end)
            known.add(text[: 2 * end])
    pages = sorted(tree.pages())
    for removal in removals if pages else ():
        page = pages[removal % len(pages)]
        path = next((text for text in sorted(known) if page in tree.match(text, len(text)).pages[-1:]), None)
        tree.remove(page)
        known = {text for text in known if path is None or not text.startswith(path)}
    tree.check_integrity()
    limit = max(0, len(query) - 1)
    hit = tree.match(query, limit)
    expected = max((len(text) for text in known if query.startswith(text) and len(text) <= limit), default=0)
    assert len(hit.pages) * 2 == expected
    assert len(set(hit.pages)) == len(hit.pages)
    whole = limit // 2 * 2
    assert (hit.miss is None) == (expected == whole and whole > 0)
