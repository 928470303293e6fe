"""Reading and writing whole rows of a cache by address.

Contract. A cache is seen as rows [A, B] of any dtype. `load_rows(cache, addresses int64 [...], valid bool [...])` gives
[..., B]; a row that is not valid is zeros whatever its address, which may be any number, holds: stored zeros decode to
zeros in every format, so nothing that a slot or page held before can reach a result, not even a NaN.
`store_rows(cache, addresses [W], rows [W, B])` overwrites rows in place; addresses are distinct.
"""

from deepinfer.ops.cache_rows.torch import load_rows, store_rows

__all__ = ["load_rows", "store_rows"]
