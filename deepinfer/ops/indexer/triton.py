"""Index scores on Hopper: FP4 keys decoded to E4M3 in registers, FP8 products, heads summed in the tile.

A query or key keeps its block scales as E4M3 exponents relative to the largest of them, which multiplies the score.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.ops.triton import INTERPRETED, dot, e2m1_round, from_power, narrow, power_above, to_e4m3

HEADS, CHANNELS, TURNED = 32, 128, 64
KEY_BYTES = CHANNELS // 2 + CHANNELS // 32
ROWS = 4
"""Most rows of one request that share a pass over its keys."""
_TOP_FIELD = tl.constexpr(13)
_PLAIN = tl.constexpr(INTERPRETED)


@triton.jit
def _place(c):
    """Where channel c of a query goes: the codes of a key's 32-bit words come as their first four and last four."""
    return c % 8 // 4 * 64 + c // 8 * 4 + c % 4


@triton.jit
def _queries(q_ptr, turns_ptr, weights_ptr, codes_ptr, out_ptr, factor):
    row = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, 32)
    base = (row * 32 + h)[:, None, None] * 128
    b = tl.arange(0, 2)
    c = b[None, :, None] * 32 + tl.arange(0, 32)[None, None, :]
    plain = tl.load(q_ptr + base + c).to(tl.float32)
    f = b[None, :, None] * 16 + tl.arange(0, 16)[None, None, :]
    even = tl.load(q_ptr + base + 64 + 2 * f).to(tl.float32)
    odd = tl.load(q_ptr + base + 64 + 2 * f + 1).to(tl.float32)
    cos, sin = tl.load(turns_ptr + (row * 32 + f) * 2), tl.load(turns_ptr + (row * 32 + f) * 2 + 1)
    first = narrow(even * cos - odd * sin)
    second = narrow(even * sin + odd * cos)
    floor = 7.052966104933725e-38  # 6 * 2^-126
    kept_power = power_above(tl.maximum(tl.max(tl.abs(plain), 2), floor) / 6.0)
    largest = tl.maximum(tl.max(tl.abs(first), 2), tl.max(tl.abs(second), 2))
    turned_power = power_above(tl.maximum(largest, floor) / 6.0)
    top = tl.maximum(tl.max(kept_power, 1), tl.max(turned_power, 1))
    kept_field = tl.maximum(_TOP_FIELD - (top[:, None] - kept_power), 2)
    turned_field = tl.maximum(_TOP_FIELD - (top[:, None] - turned_power), 2)
    kept_scale, kept_size = from_power(kept_power)[:, :, None], from_power(kept_field + 120)[:, :, None]
    turned_scale, turned_size = from_power(turned_power)[:, :, None], from_power(turned_field + 120)[:, :, None]
    tl.store(codes_ptr + base + _place(c), to_e4m3(e2m1_round(plain / kept_scale) * kept_size))
    even_to, odd_to = _place(64 + 2 * f), _place(64 + 2 * f + 1)
    tl.store(codes_ptr + base + even_to, to_e4m3(e2m1_round(first / turned_scale) * turned_size))
    tl.store(codes_ptr + base + odd_to, to_e4m3(e2m1_round(second / turned_scale) * turned_size))
    weight = tl.load(weights_ptr + row * 32 + h).to(tl.float32) * factor
    tl.store(out_ptr + row * 32 + h, weight * from_power(tl.maximum(top - 6, 1)))


def queries(q: Tensor, turns: Tensor, weights: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """Rotate and round q BF16 [M, 32, 128] -> (E4M3 [M, 32, 128] in the kernels' order, FP32 [M, 32]).

    turns: complex64 [M, 32]. weights: [M, 32], of the heads; what comes back holds `factor` and the queries' scales.
    """
    codes = torch.empty(q.shape, dtype=torch.float8_e4m3fn, device=q.device)
    scaled = torch.empty(weights.shape, device=q.device)
    if len(q):
        _queries[(len(q),)](q, torch.view_as_real(turns), weights, codes, scaled, factor)
    return codes, scaled


@triton.jit
def _decode_words(codes, fields):
    """4 bytes = 8 codes, 4 equal exponent bytes -> codes 0..3 and codes 4..7 as E4M3.

    A PRMT whose selector has bit 3 set repeats the chosen byte's sign: from bytes of 0x80 it makes 0xFF for a negative
    code, 0x80 for a positive one; a shift brings that difference to the sign.
    """
    return tl.inline_asm_elementwise("""{
        .reg .b32 lo, hi, m, t, s;
        and.b32 lo, $3, 0xffffff00;
        add.u32 lo, lo, 0x03fff800;
        add.u32 hi, $3, 0x14100c08;
        and.b32 m, $2, 0x77777777;
        shr.u32 t, m, 16;
        prmt.b32 $0, lo, hi, m;
        prmt.b32 $1, lo, hi, t;
        mov.b32 m, 0x80808080;
        prmt.b32 s, m, m, $2;
        shl.b32 s, s, 1;
        lop3.b32 $0, $0, s, 0x80808080, 0xf8;
        shr.u32 t, $2, 16;
        prmt.b32 s, m, m, t;
        shl.b32 s, s, 1;
        lop3.b32 $1, $1, s, 0x80808080, 0xf8;
        }""", "=&r,=&r,r,r", [codes, fields], dtype=(tl.uint8, tl.uint8), is_pure=True, pack=4)  # fmt: skip


@triton.jit
def _level(code, field):
    """One E2M1 code and exponent field -> E4M3 bits."""
    magnitude = (code & 7).to(tl.int32)
    exponent = field.to(tl.int32) + (magnitude >> 1) - 1
    bits = tl.where(magnitude == 0, 0, tl.where(magnitude == 1, (field.to(tl.int32) - 1) << 3,
                    (exponent << 3) | ((magnitude & 1) << 2)))  # fmt: skip
    return (bits | ((code & 8).to(tl.int32) << 4)).to(tl.uint8)


@triton.jit
def _settle(acc):
    """A use of the accumulator, so that the product is waited for before its operand's registers are written again."""
    if _PLAIN:
        return acc
    else:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [acc], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _scores(q_ptr, weights_ptr, keys_ptr, table_ptr, places_ptr, slots_ptr, firsts_ptr, counts_ptr, visible_ptr,
            out_ptr, table_stride, out_stride, keys_each, ratio, page_size, places_stride, PLACES: tl.constexpr,
            BLOCK: tl.constexpr, R: tl.constexpr, M: tl.constexpr):  # fmt: skip
    """Scores of one group: up to R rows of one request against a stretch of its keys.

    PLACES: keys are blocks of BLOCK entries listed for the row (R = 1); else all entries in order.
    """
    N: tl.constexpr = 32 * R
    group = tl.program_id(1)
    slot = tl.load(slots_ptr + group)
    row0 = tl.load(firsts_ptr + group)
    count = tl.load(counts_ptr + group)
    n = tl.arange(0, N)
    r = tl.arange(0, R)
    row = (row0 + r).to(tl.int64)
    seen = tl.load(visible_ptr + row, mask=r < count, other=0)
    length = places_stride * BLOCK if PLACES else tl.max(seen, 0)
    first = tl.program_id(0) * keys_each
    last = tl.minimum(first + keys_each, length)
    mine = (n < 32 * count)[:, None]
    c = tl.arange(0, 64)
    q_p = q_ptr + (row0.to(tl.int64) * 32 + n)[:, None] * 128 + c[None, :]
    q0 = tl.load(q_p, mask=mine, other=0.0)
    q1 = tl.load(q_p + 64, mask=mine, other=0.0)
    weight = tl.load(weights_ptr + row0.to(tl.int64) * 32 + n, mask=n < 32 * count, other=0.0)
    m = tl.arange(0, M)
    entries = page_size // ratio
    for start in tl.range(first, last, M, num_stages=2):
        key = start + m
        if PLACES:
            listed = tl.load(places_ptr + row0.to(tl.int64) * places_stride + key // BLOCK, mask=key < last, other=-1)
            entry = listed.to(tl.int32) * BLOCK + key % BLOCK
            known = (listed >= 0) & (key < last)
        else:
            entry = key
            known = key < last
        safe = tl.where(known, entry, 0)
        page = tl.load(table_ptr + slot.to(tl.int64) * table_stride + safe // entries, mask=known, other=0)
        at = (page * entries + safe % entries) * 68
        codes = tl.load(keys_ptr + at[:, None] + c[None, :])
        powers = tl.load(keys_ptr + at[:, None] + 64 + tl.arange(0, 4)[None, :]).to(tl.int32)
        top = tl.max(powers, 1)
        fields = tl.maximum(_TOP_FIELD - top[:, None] + powers, 2)
        if _PLAIN:
            low = tl.reshape(tl.broadcast_to(fields[:, :, None], (M, 4, 16)), (M, 64))
            even, odd = _level(codes & 15, low), _level(codes >> 4, low)
            values = tl.reshape(tl.join(even, odd), (M, 16, 2, 4))
            lo, hi = tl.split(tl.permute(values, (0, 1, 3, 2)))
            lo, hi = tl.reshape(lo, (M, 64)), tl.reshape(hi, (M, 64))
        else:
            fields = (fields << 3).to(tl.uint8)
            fields = tl.reshape(tl.broadcast_to(fields[:, :, None], (M, 4, 16)), (M, 64))
            lo, hi = _decode_words(codes, fields)
        acc = tl.zeros((M, N), tl.float32)
        acc = dot(lo.to(tl.float8e4nv, bitcast=True), tl.trans(q0), acc)
        acc = _settle(dot(hi.to(tl.float8e4nv, bitcast=True), tl.trans(q1), acc))
        s = tl.sum(tl.reshape(tl.maximum(acc, 0.0) * weight[None, :], (M, R, 32)), 2)
        s *= from_power(tl.maximum(top - 6, 1))[:, None]
        allowed = known[:, None] & (entry[:, None] < seen[None, :])
        to = out_ptr + row[None, :] * out_stride + key[:, None]
        tl.store(to, tl.where(allowed, s, -float("inf")), mask=(key < last)[:, None] & (r < count)[None, :])


def scores(
    codes: Tensor,
    weights: Tensor,
    keys: Tensor,
    page_table: Tensor,
    slots: Tensor,
    firsts: Tensor,
    counts: Tensor,
    visible: Tensor,
    length: int,
    page_size: int,
    ratio: int,
    blocks: Tensor | None = None,
    block: int = 1,
) -> Tensor:
    """Scores FP32 [M, length] of `queries` against entries; what lies at or beyond a row's `visible` is undefined.

    Rows come in groups of up to `ROWS` of one request: slots, firsts, counts int32 [G]. keys: uint8 [A, 68], entries by
    address. page_table: int64 [slots, columns]. visible: int32 [M]. length: host bound on it. With `blocks` int32
    [M, B], -1 for none, column i is entry i % block of the row's block i // block, -inf where it may not be chosen;
    then groups are single rows and `length` is B * block.
    """
    out = torch.empty(len(codes), length, device=codes.device)
    groups = len(slots)
    if groups and length:
        tile = 128 if ROWS == 1 else 64
        wanted = max(1, -(-528 // groups))
        each = -(-triton.cdiv(length, wanted) // tile) * tile
        each = max(each, 4 * tile)
        _scores[(triton.cdiv(length, each), groups)](
            codes, weights, keys, page_table, blocks, slots, firsts, counts, visible, out, page_table.stride(0),
            out.stride(0), each, ratio, page_size, 0 if blocks is None else blocks.shape[1],
            PLACES=blocks is not None, BLOCK=block, R=1 if groups == len(codes) else ROWS, M=tile,
        )  # fmt: skip
    return out


@triton.jit
def _addresses(chosen_ptr, slots_ptr, table_ptr, blocks_ptr, out_ptr, count, table_stride, blocks_stride, entries,
               BLOCKS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, WIDTH)
    place = tl.load(chosen_ptr + row * count + k, mask=k < count, other=-1)
    if BLOCKS:
        listed = tl.load(blocks_ptr + row * blocks_stride + tl.maximum(place, 0) // BLOCK, mask=place >= 0, other=-1)
        place = tl.where((place >= 0) & (listed >= 0), listed * BLOCK + place % BLOCK, -1)
    safe = tl.maximum(place, 0)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    page = tl.load(table_ptr + slot * table_stride + safe // entries, mask=place >= 0, other=0).to(tl.int32)
    tl.store(out_ptr + row * count + k, tl.where(place >= 0, page * entries + safe % entries, -1), mask=k < count)


def entry_rows(
    chosen: Tensor, slots: Tensor, page_table: Tensor, entries: int, blocks: Tensor | None = None, block: int = 1
) -> Tensor:
    """Addresses int32 [M, K] of chosen entries int32 [M, K] (with `blocks` as in `scores`: of columns), -1 for none."""
    out = torch.empty_like(chosen)
    if len(chosen):
        _addresses[(len(chosen),)](
            chosen, slots, page_table, blocks, out, chosen.shape[1], page_table.stride(0),
            0 if blocks is None else blocks.shape[1], entries, BLOCKS=blocks is not None, BLOCK=block,
            WIDTH=triton.next_power_of_2(chosen.shape[1]),
        )  # fmt: skip
    return out
