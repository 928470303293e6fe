"""How an engine is set up: sizes, caches, the loop."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinfer.core.errors import ConfigError

DTYPES = ("float32", "bfloat16")
DRAFT_RULES = ("equality", "rejection")
TABLE_PLACES = ("device", "host")
LOAD_FORMATS = ("checkpoint", "random")
_LEAST = {
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "max_chunk": 1,
    "page_size": 2,
    "cache_bytes": 1,
    "host_cache_bytes": 0,
    "disk_cache_bytes": 1,
    "max_encoder_patches": 1,
    "image_cache_bytes": 0,
    "max_images": 0,
    "max_image_bytes": 1,
    "max_image_pixels": 1,
    "ep": 1,
    "dp": 1,
    "cp": 1,
    "rebalance_steps": 0,
    "nextn": 0,
}
_HOST = re.compile(r"([\w-]+(\.[\w-]+)*|\[[0-9A-Fa-f:.]+\])(:\d{1,5})?")
_MAY_BE_NONE = ("max_chunk", "cache_bytes", "ep", "dp", "nextn")


@dataclass(frozen=True)
class EngineConfig:
    """Settings of one engine; ConfigError for values that cannot be.

    max_num_seqs: most requests that run at once.
    max_num_batched_tokens: most rows of one step; at least `max_num_seqs`.
    max_chunk: most prompt tokens of one request in one step; None: whatever the step has room for.
    page_size: tokens of a page of global KV; even.
    cache_bytes: memory for caches; None: a quarter of the free memory, and no more than `max_num_seqs` requests of the
        whole context need.
    host_cache_bytes: host memory for pages that were evicted; 0: none.
    disk_cache: directory for evicted pages that survives a restart; None: none. disk_cache_bytes: its budget.
    prefix_cache: whether requests share the pages of equal beginnings.
    nextn: longest draft in tokens, 0 for no speculation; None: what DEEPINFER_USE_NEXTN_DECODE says.
    varlen: whether only as many drafts are verified as pay, by their confidence and the time of rounds; None: what
        DEEPINFER_ENABLE_MTP_VARLEN says.
    draft_rule: how drafts of random requests are judged. "equality": a draft stays where it is what the target draws,
        so the tokens are those of decoding without drafts, and a seed repeats them; "rejection": the tokens have the
        same distribution and more drafts stay, but which tokens they are depends on what was drafted.
    asynchronous: whether a step is planned while the one before it runs.
    dtype: "float32" or "bfloat16", of weights and activations; None: float32 on a CPU, bfloat16 on a GPU.
    keep_quantized: whether matrices stored in FP8 and FP4 stay so, and the inputs of their products are rounded to FP8;
        else they are dequantised to `dtype` at loading. None: only on a GPU with bfloat16.
    max_encoder_patches: most patches of images that one step sends through the whole vision tower, so that requests
        which generate do not wait for longer; a larger image takes several steps.
    image_cache_bytes: memory for the embeddings of images; what running requests need stays in any case.
    max_images: most images of a request. max_image_bytes, max_image_pixels: of one image, before anything is decoded.
    image_url_hosts: hosts that images may be fetched from, redirects included: "name" (at the scheme's own port) or
        "name:port". None by default. image_url_seconds: most time for one of them.
    load_format: "checkpoint", or "random": random weights of the checkpoint's shape, whose own are not read.
    engram_tables: "device", where ranks that share experts share the rows of these tables too, or "host": read from
        host memory, where the processes of a machine have one copy (the pages of the checkpoint's files).
    ep: ranks that share the routed experts: all, or 1 (every rank has all of them). dp: groups of ranks that serve
        requests of their own. cp: ranks of a group, which share a prompt's rows. Ranks are dp x cp; None: by the rest.
    rebalance_steps: where experts are shared, steps after which they move to other ranks by the loads that were
        counted; 0: never.
    count_experts: whether to count how often each expert is chosen (`statistics.expert_visits`).
    """

    max_num_seqs: int = 32
    max_num_batched_tokens: int = 4096
    max_chunk: int | None = None
    page_size: int = 64
    cache_bytes: int | None = None
    host_cache_bytes: int = 0
    disk_cache: str | Path | None = None
    disk_cache_bytes: int = 1 << 30
    prefix_cache: bool = True
    asynchronous: bool = True
    dtype: str | None = None
    keep_quantized: bool | None = None
    load_format: str = "checkpoint"
    max_encoder_patches: int = 4096
    image_cache_bytes: int = 512 << 20
    max_images: int = 64
    max_image_bytes: int = 64 << 20
    max_image_pixels: int = 89_478_485
    image_url_hosts: tuple[str, ...] = ()
    image_url_seconds: float = 10.0
    engram_tables: str = "device"
    ep: int | None = None
    dp: int | None = None
    cp: int = 1
    rebalance_steps: int = 1000
    count_experts: bool = False
    nextn: int | None = None
    draft_rule: str = "equality"
    varlen: bool | None = None

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            self._check_number(name, least)
        for name in ("prefix_cache", "asynchronous", "count_experts"):
            if not isinstance(getattr(self, name), bool):
                raise _wrong(name, getattr(self, name), "True or False")
        if not isinstance(self.varlen, bool | None):
            raise _wrong("varlen", self.varlen, "True, False or None")
        if self.draft_rule not in DRAFT_RULES:
            raise _wrong("draft_rule", self.draft_rule, " or ".join(DRAFT_RULES))
        if self.max_num_batched_tokens < self.max_num_seqs:
            takes = f"at least max_num_seqs, {self.max_num_seqs}: each running request needs a row in every step"
            raise _wrong("max_num_batched_tokens", self.max_num_batched_tokens, takes)
        if self.page_size % 2:
            raise _wrong("page_size", self.page_size, "an even number, so that no pair of tokens straddles two pages")
        if self.disk_cache is not None and not isinstance(self.disk_cache, str | Path):
            raise _wrong("disk_cache", self.disk_cache, "the path of a directory, or None")
        if not isinstance(self.keep_quantized, bool | None):
            raise _wrong("keep_quantized", self.keep_quantized, "True, False or None")
        if self.load_format not in LOAD_FORMATS:
            raise _wrong("load_format", self.load_format, " or ".join(LOAD_FORMATS))
        if self.engram_tables not in TABLE_PLACES:
            raise _wrong("engram_tables", self.engram_tables, " or ".join(TABLE_PLACES))
        if self.dtype is not None and self.dtype not in DTYPES:
            raise _wrong("dtype", self.dtype, f"{' or '.join(DTYPES)}, or None for the device's own")

        self._check_urls()

    def _check_urls(self) -> None:
        hosts, seconds = self.image_url_hosts, self.image_url_seconds
        listed = isinstance(hosts, tuple | list) and all(isinstance(host, str) for host in hosts)
        if not listed or not all(_HOST.fullmatch(host) for host in hosts):
            raise _wrong("image_url_hosts", hosts, 'a list of hosts such as "example.org" or "localhost:8000"')
        if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not 0 < seconds < float("inf"):
            raise _wrong("image_url_seconds", seconds, "a number of seconds above 0")

    def _check_number(self, name: str, least: int) -> None:
        value, may_be_none = getattr(self, name), name in _MAY_BE_NONE
        if value is None and may_be_none:
            return
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise _wrong(name, value, f"a whole number >= {least}{', or None' if may_be_none else ''}")


def _wrong(name: str, value: Any, takes: str) -> ConfigError:
    return ConfigError(f"{name} is {value!r}; it takes {takes}")
