"""Addresses of compressed entries: one page table serves latents and index keys of every source."""

from torch import Tensor


def entry_addresses(page_table: Tensor, slots: Tensor, tokens: Tensor, page_size: int, ratio: int) -> Tensor:
    """Where the entries that hold `tokens` lie among all entries of a source.

    page_table: int64 [slots, columns]. slots, tokens: int64, broadcast to [...]; tokens are positions in a request, at
    least 0. Returns int64 [...]: `page * entries a page + place in the page`.
    """
    pages = page_table[slots, tokens // page_size]
    return pages * (page_size // ratio) + tokens % page_size // ratio
