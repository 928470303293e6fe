"""Sizes of everything that is cached, from the model's dimensions alone.

Global KV lies in pages of `page_size` tokens: each KV source of ratio r has page_size / r entries in a page, a latent
and an index key each. Everything else belongs to a slot, the place of one running request: rings in which the row of
position p stands at p modulo the ring's length, long enough that a verification step can be taken back.
"""

from dataclasses import dataclass

from deepinfer.config.model import ModelConfig
from deepinfer.core.errors import ConfigError
from deepinfer.ops.kv_formats import index_bytes, latent_bytes, window_bytes

FP32_BYTES = 4
INT64_BYTES = 8


@dataclass(frozen=True)
class SourceLayout:
    """One layer that owns compressed KV: an entry every `ratio` tokens, with the bytes of its two parts."""

    layer: int
    ratio: int
    latent: int
    index: int

    @property
    def entry(self) -> int:
        """Bytes of one entry."""
        return self.latent + self.index


@dataclass(frozen=True)
class SlotBytes:
    """What one running request costs beside its pages, in bytes."""

    windows: int
    pairs: int
    drafts: int
    history: int

    @property
    def total(self) -> int:
        """All kinds together."""
        return self.windows + self.pairs + self.drafts + self.history


@dataclass(frozen=True)
class CacheLayout:
    """Shapes and bytes of the caches of one model.

    sources: the KV sources, in layer order.
    layers, draft_stages: each of them has a window of its own.
    window, window_row: tokens that a window spans, bytes of its rows.
    pair_layers: the ratio-2 sources, which pool two tokens and keep the first one's FP32 values and scores.
    pair_channels: channels of such values and scores.
    lookback: earlier token ids that Engram reads; 0 without Engram.
    """

    sources: tuple[SourceLayout, ...]
    layers: int
    draft_stages: int
    window: int
    window_row: int
    pair_layers: tuple[int, ...]
    pair_channels: int
    lookback: int

    @classmethod
    def from_config(cls, c: ModelConfig) -> "CacheLayout":
        """The layout of model `c`."""
        latent, index = latent_bytes(c.head_dim), index_bytes(c.index_head_dim)
        return cls(
            sources=tuple(SourceLayout(layer, c.ratio(layer), latent, index) for layer in c.kv_source_layer_ids),
            layers=c.num_hidden_layers,
            draft_stages=c.draft_stages,
            window=c.sliding_window,
            window_row=window_bytes(c.head_dim),
            pair_layers=tuple(layer for layer in c.kv_source_layer_ids if c.ratio(layer) == 2),
            pair_channels=c.head_dim,
            lookback=c.engram_max_ngram_size - 1 if c.engram_layer_ids else 0,
        )

    @property
    def bytes_per_token(self) -> float:
        """Global KV of one token, all layers together."""
        return sum(source.entry / source.ratio for source in self.sources)

    def page_bytes(self, page_size: int) -> int:
        """Bytes of one page, all kinds together. Raises ConfigError for a page size that splits an entry."""
        check_page_size(page_size)
        return sum(source.entry * (page_size // source.ratio) for source in self.sources)

    def ring(self, verify_rows: int) -> int:
        """Rows of a window ring, when a step runs up to `verify_rows` rows of which all but one may be taken back."""
        return self.window + verify_rows

    def pair_ring(self, verify_rows: int) -> int:
        """Rows of a pooling ring: the even positions among a verification step's and the one before it."""
        return (verify_rows + 2) // 2

    def history_ring(self, verify_rows: int) -> int:
        """Token ids of an Engram ring; those of a step with drafts may stand beside all that its first row reads."""
        return self.lookback + (verify_rows if verify_rows > 1 else 0) if self.lookback else 0

    def slot_bytes(self, verify_rows: int) -> SlotBytes:
        """What one slot costs."""
        window = self.ring(verify_rows) * self.window_row
        pair = self.pair_ring(verify_rows) * 2 * self.pair_channels * FP32_BYTES
        return SlotBytes(
            windows=self.layers * window,
            pairs=len(self.pair_layers) * pair,
            drafts=self.draft_stages * window,
            history=self.history_ring(verify_rows) * INT64_BYTES,
        )


def check_page_size(page_size: int) -> None:
    """Raise ConfigError unless a page holds whole entries of every ratio, so that no entry straddles two pages."""
    if page_size < 2 or page_size % 2:
        raise ConfigError(f"page size is {page_size}; it takes an even number of tokens, at least 2")
