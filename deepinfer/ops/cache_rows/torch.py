"""The PyTorch version: defines the operators, on any device."""

from torch import Tensor


def load_rows(cache: Tensor, addresses: Tensor, valid: Tensor) -> Tensor:
    """cache [A, B], addresses int64 [...], valid bool [...] -> [..., B], zeros where not valid."""
    safe = addresses.masked_fill(~valid, 0)
    rows = cache.index_select(0, safe.flatten()).view(*addresses.shape, cache.shape[1])
    return rows.masked_fill(~valid[..., None], 0)


def store_rows(cache: Tensor, addresses: Tensor, rows: Tensor) -> None:
    """Write rows [W, B] to the distinct `addresses` int64 [W] of cache [A, B], in place."""
    cache.index_copy_(0, addresses, rows)
