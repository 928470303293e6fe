"""What one half's rows read of their requests' compressed KV: the live entries of every group.

Index layers score all live keys; later layers gather the latents they selected. Layers that share a source share what
was unpacked here within a step.
"""

import torch
from torch import Tensor

from deepinfer.cache.storage import Caches
from deepinfer.config.model import ModelConfig
from deepinfer.core.batch import Group
from deepinfer.model.entries import entry_addresses
from deepinfer.ops.cache_rows import load_rows
from deepinfer.ops.kv_formats import unpack_index, unpack_latent


class LiveEntries:
    """Reads the compressed KV of one KV source for groups of rows; made anew for each source in each step.

    Attributes:
        ratio: tokens an entry.
    """

    def __init__(self, caches: Caches, config: ModelConfig, layer: int, dtype: torch.dtype) -> None:
        source = config.kv_source_layer_ids.index(layer)
        self.ratio = config.ratio(layer)
        self._latents, self._keys = caches.latents[source].flatten(0, 1), caches.index_keys[source].flatten(0, 1)
        self._page_table, self._page_size, self._dtype = caches.page_table, caches.page_size, dtype
        self._unpacked_keys: dict[int, Tensor] = {}  # by the group's first row
        self._unpacked_latents: dict[int, Tensor] = {}

    def count(self, group: Group) -> int:
        """S, the entries of the group's longest request."""
        return group.longest // self.ratio

    def visible(self, positions: Tensor) -> Tensor:
        """How many entries rows at these positions see: those whose tokens all lie at or before it."""
        return (positions + 1) // self.ratio

    def keys(self, group: Group) -> Tensor:
        """Index keys of all entries: [G, S, index head dim], zeros beyond a request's own."""
        if group.start not in self._unpacked_keys:
            self._unpacked_keys[group.start] = unpack_index(self._all(group, self._keys), self._dtype)
        return self._unpacked_keys[group.start]

    def latents(self, group: Group) -> Tensor:
        """Latents of all entries: [G, S, head dim], zeros beyond a request's own."""
        if group.start not in self._unpacked_latents:
            self._unpacked_latents[group.start] = unpack_latent(self._all(group, self._latents), self._dtype)
        return self._unpacked_latents[group.start]

    def chosen_latents(self, group: Group, chosen: Tensor) -> Tensor:
        """Latents of chosen entries int64 [G, K], -1 for none: [G, K, head dim], zeros for none."""
        rows = load_rows(self._latents, self._addresses(group, chosen.clamp(min=0)), chosen >= 0)
        return unpack_latent(rows, self._dtype)

    def _all(self, group: Group, cache: Tensor) -> Tensor:
        """The stored rows of all entries: uint8 [G, S, bytes]."""
        entries = torch.arange(self.count(group), device=cache.device)
        live = (group.firsts + group.count) // self.ratio
        return load_rows(cache, self._addresses(group, entries), entries < live[:, None])

    def _addresses(self, group: Group, entries: Tensor) -> Tensor:
        slots = group.slots[:, None]
        return entry_addresses(self._page_table, slots, entries * self.ratio, self._page_size, self.ratio)
