"""KV cache rows as stored bytes: packing rounds a row to its format, unpacking gives the rounded values back.

| kind | format | bytes of a row of D values |
|---|---|---|
| window | E4M3, a power-of-two scale per 32 | D + D/32 |
| latent | E2M1 (NVFP4), an E4M3 scale per 16 | D/2 + D/16 |
| index | E2M1 (MXFP4), a power-of-two scale per 32 | D/2 + D/32 |

A stored row is its elements, then its scales, both in the order of the channels; of two four-bit elements in a byte the
even channel has the low nibble. A power-of-two scale is its FP32 exponent byte (E8M0).

Contract: `unpack_*(pack_*(x), x.dtype)` equals the round trip of the same name in `checkpoint.formats` to the bit.
Rows are independent of each other. A NaN anywhere in a block reads back as NaN.
"""

from deepinfer.ops.kv_formats.sizes import index_bytes, latent_bytes, window_bytes
from deepinfer.ops.kv_formats.torch import (
    pack_index,
    pack_latent,
    pack_window,
    unpack_index,
    unpack_latent,
    unpack_window,
)

__all__ = [
    "index_bytes",
    "latent_bytes",
    "pack_index",
    "pack_latent",
    "pack_window",
    "unpack_index",
    "unpack_latent",
    "unpack_window",
    "window_bytes",
]
