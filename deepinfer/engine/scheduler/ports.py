"""What the scheduler needs from others: the owner of the pages (`deepinfer.cache.manager.KVManager` fits), and who says
how many drafts are worth verifying.
"""

from collections.abc import Hashable, Sequence
from typing import Protocol

from deepinfer.core.plan import NO_DRAFTS, Admitted, Verification

__all__ = ["NO_DRAFTS", "Admitted", "DraftPolicy", "PageOwner", "Verification"]


class DraftPolicy(Protocol):
    """Says for every step how drafts are dealt with."""

    def decide(self, chances: Sequence[Sequence[float] | None]) -> Verification:
        """`chances`: for each request that decodes, survival of the drafts of its newest block that has been verified.

        None: there is no such block. The block at hand must not count here, even where the host knows it already.
        """

    def observe(self, rows: int, drafted: int, seconds: float) -> None:
        """Learn from a step over `rows` rows, of newest tokens and drafts, that drafted for `drafted` requests."""


class PageOwner(Protocol):
    """Owns pages, reference counts, prefix tree and tiers; only the scheduler calls it, one call at a time."""

    @property
    def page_size(self) -> int:
        """Tokens a page holds."""

    @property
    def total_pages(self) -> int:
        """Pages there are, however used now."""

    @property
    def available_pages(self) -> int:
        """Pages that requests could take now: free ones and cached ones that no running request uses."""

    def admit(
        self, request_id: int, keys: Sequence[Hashable], tokens: int, *, spare: int, may_hit: bool
    ) -> Admitted | None:
        """Take pages for the first `tokens` tokens of a request, whose prompt's content is `keys` (one a token).

        Shared pages that already hold the start of `keys` come first (at most all but the last of `tokens` tokens; none
        if not `may_hit`), fresh ones follow. None, and nothing changes, unless `spare` pages stay available after it.
        """

    def extend(self, request_id: int, tokens: int) -> Sequence[int] | None:
        """Take fresh pages until the request's pages hold `tokens` tokens; returns the new ones.

        None, and nothing changes, if there are not enough.
        """

    def publish(self, request_id: int, keys: Sequence[Hashable]) -> None:
        """Let others share the request's next whole pages: their tokens, with the content `keys`, are written.

        The first call goes on where the hit ended, each further call where the last one did. Pages that were to be
        loaded from a tier are shared no sooner: when the first step of the request has come back well.
        """

    def release(self, request_id: int) -> None:
        """Take back all pages of a request: no step in flight uses them any more. What it published stays shared."""
