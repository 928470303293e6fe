"""How much of a prompt the tiers hold beyond what is on the device."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from deepinfer.cache.content import page_digest
from deepinfer.cache.prefix import EVICTED, FIRST_SEEN, Match, PrefixTree
from deepinfer.cache.tiers import TierStack


@dataclass(frozen=True, slots=True)
class Fetched:
    """Pages that follow a match, as bytes: `data`, each with the name of its tier; and why there are no more."""

    data: tuple[bytes, ...]
    tiers: tuple[str, ...]
    miss: str | None


def fetch_below(tree: PrefixTree, tiers: TierStack, match: Match, keys: Sequence[Hashable], limit: int) -> Fetched:
    """Fetch the pages that follow `match` in `keys`, as far as the tiers hold them and at most up to `limit` tokens."""
    data: list[bytes] = []
    names: list[str] = []
    digest = match.node.digest
    for chunk in tree.chunks(keys, limit, start=len(match.pages) * tree.page_size):
        digest = page_digest(digest, chunk)
        found = tiers.get(digest)
        if found is None:
            if data:
                miss = EVICTED if tree.was_evicted(digest) else FIRST_SEEN
                return Fetched(tuple(data), tuple(names), miss)
            break
        data.append(found[0])
        names.append(found[1])
    return Fetched(tuple(data), tuple(names), None if data else match.miss)
