"""Counters of the prefix cache."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class CacheStatistics:
    """What happened since the start; the KV manager counts.

    requests, prompt_tokens: admitted ones. hit_tokens: of these, tokens whose global KV was there already.
    misses: why hits were no longer, by reason ("differs" for all positions together).
    evicted_pages: pages with content that were handed out for something else.
    """

    requests: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    misses: Counter[str] = field(default_factory=Counter)
    evicted_pages: int = 0

    def admitted(self, prompt_tokens: int, hit_tokens: int, miss: str | None) -> None:
        """Count one admission."""
        self.requests += 1
        self.prompt_tokens += prompt_tokens
        self.hit_tokens += hit_tokens
        if miss is not None:
            self.misses["differs" if miss.startswith("differs") else miss] += 1
