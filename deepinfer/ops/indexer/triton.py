"""Index queries on Hopper: rotated, rounded to FP4, written as E4M3 in the scores' order; addresses of entries."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.ops.triton import e2m1_round, from_power, narrow, power_above, to_e4m3

HEADS, CHANNELS, TURNED = 32, 128, 64


@triton.jit
def _channel(place):
    """Which channel of a query lies at a place: the order in which threads hold a key's codes (`index_scores.cu`)."""
    return place % 16 // 4 * 32 + place // 32 * 8 + place % 32 // 16 * 4 + place % 4


@triton.jit
def _queries(q_ptr, turns_ptr, weights_ptr, codes_ptr, out_ptr, factor, H: tl.constexpr):
    """H heads of a row. Block scales become E4M3 exponents relative to the head's largest, whose field for 1.0 is 6."""
    row = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * H + tl.arange(0, H)
    place = tl.arange(0, 128)
    c = _channel(place)[None, :]
    head = q_ptr + (row * 32 + h)[:, None] * 128
    own, other = tl.load(head + c).to(tl.float32), tl.load(head + (c ^ 1)).to(tl.float32)
    turn = turns_ptr + (row * 32 + tl.maximum(c - 64, 0) // 2) * 2
    cos, sin = tl.load(turn, mask=c >= 64, other=1.0), tl.load(turn + 1, mask=c >= 64, other=0.0)
    x = tl.reshape(narrow(own * cos + tl.where(c % 2 == 0, -other, other) * sin), (H, 8, 4, 4))
    largest = tl.max(tl.max(tl.abs(x), 3), 1)  # of each 32 channels
    power = power_above(tl.maximum(largest, 7.052966104933725e-38) / 6.0)  # at least 6 * 2^-126
    top = tl.max(power, 1)
    size = from_power(tl.maximum(126 - top[:, None] + power, 1))
    rounded = e2m1_round(x * from_power(254 - power)[:, None, :, None]) * size[:, None, :, None]
    to = codes_ptr + (row * 32 + h)[:, None] * 128 + place[None, :]
    tl.store(to, to_e4m3(tl.reshape(rounded, (H, 128))))
    weight = tl.load(weights_ptr + row * 32 + h).to(tl.float32) * factor
    tl.store(out_ptr + row * 32 + h, weight * from_power(tl.minimum(top + 1, 254)))


def queries(q: Tensor, turns: Tensor, weights: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """Rotate and round q BF16 [M, 32, 128] -> (E4M3 [M, 32, 128] in the kernels' order, FP32 [M, 32]).

    turns: complex64 [M, 32]. weights: [M, 32], of the heads; what comes back holds `factor` and the queries' scales.
    """
    codes = torch.empty(q.shape, dtype=torch.float8_e4m3fn, device=q.device)
    scaled = torch.empty(weights.shape, device=q.device)
    if len(q):
        _queries[(len(q), 4)](q, torch.view_as_real(turns), weights, codes, scaled, factor, H=8)
    return codes, scaled


@triton.jit
def _addresses(entries_ptr, slots_ptr, table_ptr, out_ptr, count, table_stride, each, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, WIDTH)
    entry = tl.load(entries_ptr + row * count + k, mask=k < count, other=-1)
    safe = tl.maximum(entry, 0)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    page = tl.load(table_ptr + slot * table_stride + safe // each, mask=entry >= 0, other=0).to(tl.int32)
    tl.store(out_ptr + row * count + k, tl.where(entry >= 0, page * each + safe % each, -1), mask=k < count)


def entry_rows(entries: Tensor, slots: Tensor, page_table: Tensor, each: int) -> Tensor:
    """Addresses int32 [M, K] of entries int32 [M, K], -1 for none; a page holds `each` of them."""
    out = torch.empty_like(entries)
    if len(entries):
        _addresses[(len(entries),)](
            entries, slots, page_table, out, entries.shape[1], page_table.stride(0), each,
            WIDTH=triton.next_power_of_2(entries.shape[1]),
        )  # fmt: skip
    return out
