"""How an engine is set up: sizes, caches, the loop."""

from dataclasses import dataclass
from pathlib import Path

from deepinfer.core.errors import ConfigError

DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class EngineConfig:
    """Settings of one engine; ConfigError for values that cannot be.

    max_num_seqs: most requests that run at once.
    max_num_batched_tokens: most rows of one step; at least `max_num_seqs`.
    max_chunk: most prompt tokens of one request in one step; None: whatever the step has room for.
    page_size: tokens of a page of global KV; even.
    cache_bytes: memory for pages of global KV; None: a quarter of the free memory, and no more than `max_num_seqs`
        requests of the whole context need.
    host_cache_bytes: host memory for pages that were evicted; 0: none.
    disk_cache: directory for evicted pages that survives a restart; None: none. disk_cache_bytes: its budget.
    prefix_cache: whether requests share the pages of equal beginnings.
    asynchronous: whether a step is planned while the one before it runs.
    dtype: "float32" or "bfloat16", of weights and activations; None: float32 on a CPU, bfloat16 on a GPU.
    """

    max_num_seqs: int = 32
    max_num_batched_tokens: int = 4096
    max_chunk: int | None = None
    page_size: int = 64
    cache_bytes: int | None = None
    host_cache_bytes: int = 0
    disk_cache: Path | None = None
    disk_cache_bytes: int = 1 << 30
    prefix_cache: bool = True
    asynchronous: bool = True
    dtype: str | None = None

    def __post_init__(self) -> None:
        for name, least in (("cache_bytes", 1), ("host_cache_bytes", 0), ("disk_cache_bytes", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} is {value}; it takes a number of bytes, at least {least}")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ConfigError(f"dtype is {self.dtype!r}; it takes {' or '.join(DTYPES)}, or None for the device's own")
