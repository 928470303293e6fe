"""What a stretch of rows scores: entries of its requests, by page table."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Index:
    """The entries of one source, for M rows.

    keys: uint8 [A, row], by address. page_table: int64 [slots, columns]. page_size: tokens of a page. ratio: tokens of
    an entry. slots: int32 [M]. visible: int32 [M], entries a row sees. length: a bound on `visible`, or on columns.
    group_slots, group_firsts, group_counts: int32 [G]; rows of one request that share a pass over its keys.
    blocks: int32 [M, B], candidate blocks, -1 for none: then column i is entry i % block of block i // block of the
        row's list, and groups are single rows; None: column i is entry i.
    """

    keys: Tensor
    page_table: Tensor
    page_size: int
    ratio: int
    slots: Tensor
    visible: Tensor
    length: int
    group_slots: Tensor
    group_firsts: Tensor
    group_counts: Tensor
    blocks: Tensor | None = None
    block: int = 1

    @property
    def entries(self) -> int:
        """Of a page."""
        return self.page_size // self.ratio
