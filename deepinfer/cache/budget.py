"""How many bytes caches of given sizes take, and how many pages fit into given bytes, without allocating any."""

from dataclasses import dataclass

from deepinfer.cache.layout import INT64_BYTES, CacheLayout, check_page_size
from deepinfer.config.model import ModelConfig
from deepinfer.core.errors import ConfigError


@dataclass(frozen=True)
class CacheSizes:
    """The arguments of `Caches`, from which its bytes follow exactly."""

    config: ModelConfig
    slots: int
    page_size: int = 64
    verify_rows: int = 1

    def __post_init__(self) -> None:
        check_page_size(self.page_size)

    @property
    def layout(self) -> CacheLayout:
        """The model's cache layout."""
        return CacheLayout.from_config(self.config)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of global KV."""
        return self.layout.page_bytes(self.page_size)

    def pages_for(self, context: int, requests: int) -> int:
        """Pages that `requests` requests of `context` tokens each need when they share none.

        Raises ConfigError for a context that the model does not have.
        """
        longest = self.config.max_position_embeddings
        if not 1 <= context <= longest:
            raise ConfigError(f"context is {context} tokens; this model takes 1 to {longest} (max_position_embeddings)")
        return requests * -(-context // self.page_size)

    def slot_parts(self) -> dict[str, int]:
        """Bytes of what all slots keep beside pages and page table, by kind."""
        each = self.layout.slot_bytes(self.verify_rows)
        parts = {"windows": each.windows, "pooling pairs": each.pairs, "draft windows": each.drafts}
        newest = INT64_BYTES
        return {name: self.slots * size for name, size in {**parts, "histories": each.history + newest}.items()}

    def table_bytes(self, pages: int) -> int:
        """Bytes of the page table."""
        return self.slots * min(pages, self._longest_list) * INT64_BYTES

    def total(self, pages: int) -> int:
        """Bytes of all caches with `pages` pages."""
        return pages * self.page_bytes + self.table_bytes(pages) + sum(self.slot_parts().values())

    def pages_in(self, memory: int) -> int:
        """The most pages whose caches fit into `memory` bytes; 0 if not even one does."""
        rest = memory - sum(self.slot_parts().values())
        short_lists = rest // (self.page_bytes + self.slots * INT64_BYTES)
        if short_lists <= self._longest_list:
            return max(0, short_lists)
        return (rest - self.table_bytes(self._longest_list)) // self.page_bytes

    @property
    def _longest_list(self) -> int:
        """Pages of a request as long as the model allows."""
        return -(-self.config.max_position_embeddings // self.page_size)
