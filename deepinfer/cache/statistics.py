"""Counters of the prefix cache."""

from collections import Counter
from dataclasses import dataclass, field

from deepinfer.cache.lookup import Fetched


@dataclass(slots=True)
class CacheStatistics:
    """What happened since the start; the KV manager counts.

    admissions, prompt_tokens: starts of requests and their prompts; a preempted request starts again.
    hit_tokens: tokens of these prompts whose global KV was there already.
    misses: why hits were no longer, by reason ("differs" for all positions together).
    loaded_pages: hit pages that came from a tier, by its name. stored_pages: pages that went to the tiers.
    evicted_pages: pages with content that were handed out for something else.
    """

    admissions: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    misses: Counter[str] = field(default_factory=Counter)
    loaded_pages: Counter[str] = field(default_factory=Counter)
    stored_pages: int = 0
    evicted_pages: int = 0

    def admitted(self, prompt_tokens: int, hit_tokens: int, fetched: Fetched) -> None:
        """Count one admission."""
        self.admissions += 1
        self.prompt_tokens += prompt_tokens
        self.hit_tokens += hit_tokens
        self.loaded_pages.update(fetched.tiers)
        if fetched.miss is not None:
            self.misses["differs" if fetched.miss.startswith("differs") else fetched.miss] += 1
