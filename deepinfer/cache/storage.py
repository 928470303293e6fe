"""The device tensors of all caches, allocated once."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from deepinfer.cache.layout import CacheLayout, check_page_size
from deepinfer.config.model import ModelConfig
from deepinfer.core.errors import ConfigError


class Caches:
    """Every cache of one model on one device; nothing is allocated after construction.

    The model writes and reads rows; the scheduler's side decides which page and slot belong to whom. All memory starts
    as zeros and always decodes to finite numbers, so that a masked row can never bring in a NaN.

    Attributes (P pages of T tokens, S slots; i counts the KV sources, k the ratio-2 sources, both in layer order):
        latents[i]: uint8 [P, T / ratio, latent bytes], packed NVFP4: entry j of a page is its j-th group of tokens.
        index_keys[i]: uint8 [P, T / ratio, index bytes], packed MXFP4.
        windows: uint8 [layers, S, ring, window bytes], packed FP8; the row of position p is at p % ring.
        drafts: uint8 [draft stages, S, ring, window bytes], likewise.
        pairs: FP32 [k, S, pair ring, 2, head_dim]: values and scores of the even position p at (p // 2) % pair ring.
        history: int64 [S, history ring]: the token id of position p at p % history ring; no columns without Engram.
        page_table: int64 [S, most pages a request]: page of tokens n*T to n*T + T-1 in column n.
        newest: int64 [S]: the last sampled token.
    """

    def __init__(
        self,
        config: ModelConfig,
        pages: int,
        slots: int,
        page_size: int = 64,
        verify_rows: int = 1,
        device: torch.device | str = "cpu",
    ) -> None:
        """Allocate; `verify_rows` is the most rows of one request in a step that may have to be taken back.

        Raises ConfigError for sizes that cannot be.
        """
        check_page_size(page_size)
        for name, value in (("pages", pages), ("slots", slots), ("verify_rows", verify_rows)):
            if value < 1:
                raise ConfigError(f"{name} is {value}; it takes at least 1")
        layout = CacheLayout.from_config(config)
        self.layout, self.pages, self.slots, self.page_size = layout, pages, slots, page_size
        self.ring = layout.ring(verify_rows)

        def zeros(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.latents = [zeros(pages, page_size // s.ratio, s.latent) for s in layout.sources]
        self.index_keys = [zeros(pages, page_size // s.ratio, s.index) for s in layout.sources]
        self.windows = zeros(layout.layers, slots, self.ring, layout.window_row)
        self.drafts = zeros(layout.draft_stages, slots, self.ring, layout.window_row)
        pair_ring, channels = layout.pair_ring(verify_rows), layout.pair_channels
        self.pairs = zeros(len(layout.pair_layers), slots, pair_ring, 2, channels, dtype=torch.float32)
        self.history = zeros(slots, layout.history_ring(verify_rows), dtype=torch.int64)
        longest = min(pages, -(-config.max_position_embeddings // page_size))
        self.page_table = zeros(slots, longest, dtype=torch.int64)
        self.newest = zeros(slots, dtype=torch.int64)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, all kinds together."""
        return self.layout.page_bytes(self.page_size)

    def read_pages(self, pages: Sequence[int]) -> list[bytes]:
        """Copy pages to host memory, `page_bytes` each: source by source, latents before index keys."""
        if not pages:
            return []
        rows = torch.tensor(pages, device=self.page_table.device)
        together = torch.cat([part[rows].flatten(1) for part in self._page_parts()], 1).cpu()
        return [row.numpy().tobytes() for row in together]

    def write_pages(self, pages: Sequence[int], data: Sequence[bytes]) -> None:
        """Fill pages with what `read_pages` gave for others of the same layout, one entry of `data` a page."""
        if not pages:
            return
        joined = torch.frombuffer(bytearray(b"".join(data)), dtype=torch.uint8).view(len(pages), self.page_bytes)
        rows = torch.tensor(pages, device=self.page_table.device)
        parts = self._page_parts()
        columns = torch.split(joined.to(rows.device), [part[0].numel() for part in parts], dim=1)
        for part, values in zip(parts, columns, strict=True):
            part[rows] = values.reshape(len(pages), *part.shape[1:])

    def map_pages(self, pages: Mapping[int, Sequence[int]]) -> None:
        """Set the pages of slots: all that each of them has, in their order."""
        if not pages:
            return
        slots = np.repeat(np.fromiter(pages, dtype=np.int64), [len(row) for row in pages.values()])
        columns = np.concatenate([np.arange(len(row)) for row in pages.values()])
        values = np.concatenate([np.array(row, dtype=np.int64) for row in pages.values()])
        places = (
            torch.from_numpy(part).to(self.page_table.device, non_blocking=True) for part in (slots, columns, values)
        )
        slot, column, page = places
        self.page_table[slot, column] = page

    def _page_parts(self) -> list[Tensor]:
        return [part for pair in zip(self.latents, self.index_keys, strict=True) for part in pair]
