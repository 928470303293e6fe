"""The prefixes whose pages are on the device: a tree with one node a page, found by content."""

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from deepinfer.cache.content import page_digest, root_digest

Keys = tuple[Hashable, ...]
_SIBLINGS_COMPARED = 256  # when explaining a miss; the newest
_EVICTED_REMEMBERED = 65_536  # digests, to tell an evicted page from one never seen

EVICTED = "evicted"
FIRST_SEEN = "first seen"
TOO_SHORT = "too short"
MODE_FORBIDS = "mode forbids"


class Node:
    """One page of a known prefix; its ancestors are the pages before it. Only the tree changes it.

    page: -1 at the root, which stands for the empty prefix, and once the node was removed.
    """

    __slots__ = ("attached", "children", "digest", "keys", "page", "parent")

    def __init__(self, keys: Keys, digest: bytes, page: int, parent: "Node | None") -> None:
        self.keys = keys
        self.digest = digest
        self.page = page
        self.parent = parent
        self.children: dict[Keys, Node] = {}
        self.attached = True


@dataclass(frozen=True, slots=True)
class Match:
    """The longest known prefix of some keys: its pages, its last node, and why it is no longer (None: it is whole)."""

    pages: tuple[int, ...]
    node: Node
    miss: str | None


class PrefixTree:
    """Maps content to pages. It holds no page: pages that it knows are kept by the page manager until it forgets them.

    Two requests that write the same content at the same time have a page each; the tree knows the first one's.
    """

    def __init__(self, page_size: int, identity: str) -> None:
        """`identity` names all that decides what a page holds beside the tokens: model, formats, page size."""
        self.page_size = page_size
        self.root = Node((), root_digest(identity), -1, None)
        self._nodes: dict[int, Node] = {}
        self._evicted: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, page: object) -> bool:
        return page in self._nodes

    def pages(self) -> frozenset[int]:
        """All pages that the tree knows."""
        return frozenset(self._nodes)

    def digest(self, page: int) -> bytes:
        """Digest of a page that the tree knows."""
        return self._nodes[page].digest

    def match(self, keys: Sequence[Hashable], limit: int) -> Match:
        """Find the longest known prefix of `keys` in whole pages and at most `limit` tokens."""
        node = self.root
        pages: list[int] = []
        for chunk in self.chunks(keys, limit):
            child = node.children.get(chunk)
            if child is None:
                return Match(tuple(pages), node, self._reason(node, chunk, len(pages) * self.page_size))
            pages.append(child.page)
            node = child
        return Match(tuple(pages), node, None if pages else TOO_SHORT)

    def chunks(self, keys: Sequence[Hashable], limit: int, start: int = 0) -> Iterator[Keys]:
        """The keys of each whole page that begins at token `start` or later and ends within `limit` tokens."""
        size = self.page_size
        for end in range(start + size, limit + 1, size):
            yield tuple(keys[end - size : end])

    def add(self, parent: Node, keys: Keys, page: int) -> Node:
        """Let the content `keys` after `parent` be found in `page`; returns its node, unchanged if there is one."""
        node = parent.children.get(keys)
        if node is None:
            node = Node(keys, page_digest(parent.digest, keys), page, parent)
            parent.children[keys] = node
            self._nodes[page] = node
            self._evicted.pop(node.digest, None)
        return node

    def remove(self, page: int) -> list[tuple[int, bytes]]:
        """Forget a page and all that follow it, which can no longer be reached: [(page, digest)]; [] if unknown."""
        node = self._nodes.get(page)
        if node is None or node.parent is None:
            return []
        del node.parent.children[node.keys]
        gone, stack = [], [node]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            gone.append((node.page, node.digest))
            self._detach(node)
        return gone

    def was_evicted(self, digest: bytes) -> bool:
        """Whether the page with this digest was known and then forgotten, not too long ago."""
        return digest in self._evicted

    def check_integrity(self) -> None:
        """Raise RuntimeError unless the index of pages and the tree are the same."""
        found, stack = {}, [self.root]
        while stack:
            node = stack.pop()
            for keys, child in node.children.items():
                if child.keys != keys or child.parent is not node or not child.attached or child.page in found:
                    raise RuntimeError(f"the node of page {child.page} does not fit its place")
                found[child.page] = child
                stack.append(child)
        if found != self._nodes:
            raise RuntimeError("the tree and its index of pages differ")

    def _detach(self, node: Node) -> None:
        del self._nodes[node.page]
        node.parent, node.page, node.attached = None, -1, False
        node.children = {}
        self._evicted[node.digest] = None
        if len(self._evicted) > _EVICTED_REMEMBERED:
            self._evicted.popitem(last=False)

    def _reason(self, node: Node, chunk: Keys, position: int) -> str:
        """Why the page with keys `chunk`, which begins at token `position`, is not below `node`."""
        if self.was_evicted(page_digest(node.digest, chunk)):
            return EVICTED
        siblings = islice(reversed(node.children.values()), _SIBLINGS_COMPARED)
        common = max((_common(chunk, sibling.keys) for sibling in siblings), default=-1)
        if common < 0 or (common == 0 and node is self.root):
            return FIRST_SEEN
        return f"differs at token {position + common}"


def _common(one: Keys, other: Keys) -> int:
    """How many keys the two begin with in common."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))
