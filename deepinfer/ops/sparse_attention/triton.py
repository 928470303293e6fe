"""From attention's output to what the first output projection takes: rotated back, rounded, group by group."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.ops.linear import Fp8Rows
from deepinfer.ops.linear.triton import FEW_GROUPED_ROWS
from deepinfer.ops.triton import from_power, narrow, power_above, to_e4m3


@triton.jit
def _output_rows(o_ptr, turns_ptr, codes_ptr, scales_ptr, groups, row_stride, group_stride, HEADS: tl.constexpr,
                 D: tl.constexpr, TURNED: tl.constexpr, KEPT_BLOCK: tl.constexpr):  # fmt: skip
    KEPT: tl.constexpr = D - TURNED
    PAIRS: tl.constexpr = TURNED // 2
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1).to(tl.int64)
    h = tl.arange(0, HEADS)[:, None] * D
    item = row * row_stride + group * group_stride
    base, to = (row * groups + group) * HEADS * D, item * HEADS * D
    c = tl.arange(0, KEPT_BLOCK)[None, :]
    inside = (c < KEPT) & (h >= 0)
    plain = tl.load(o_ptr + base + h + c, mask=inside, other=0.0).to(tl.float32)
    f = tl.arange(0, PAIRS)
    tail = h + KEPT + 2 * f[None, :]
    even, odd = tl.load(o_ptr + base + tail).to(tl.float32), tl.load(o_ptr + base + tail + 1).to(tl.float32)
    cos = tl.load(turns_ptr + (row * PAIRS + f) * 2)[None, :]
    sin = tl.load(turns_ptr + (row * PAIRS + f) * 2 + 1)[None, :]
    first = narrow(even * cos + odd * sin)
    second = narrow(odd * cos - even * sin)
    largest = tl.maximum(tl.max(tl.max(tl.abs(first), 1), 0), tl.max(tl.max(tl.abs(second), 1), 0))
    largest = tl.maximum(largest, tl.max(tl.max(tl.abs(plain), 1), 0))
    scale = from_power(power_above(tl.maximum(largest, 7.888609052210118e-31) / 448.0))
    tl.store(codes_ptr + to + h + c, to_e4m3(plain / scale), mask=inside)
    tl.store(codes_ptr + to + tail, to_e4m3(first / scale))
    tl.store(codes_ptr + to + tail + 1, to_e4m3(second / scale))
    tl.store(scales_ptr + item, scale)


def output_rows(o: Tensor, turns: Tensor, groups: int) -> Fp8Rows:
    """o BF16 [M, h, D], turns complex64 [M, F] -> rotated back by them and rounded: [M, groups, h / groups * D].

    Many rows lie group by group, as products of the groups read them.
    """
    rows, heads, dim = o.shape
    apart = rows > FEW_GROUPED_ROWS
    shape = (groups, rows) if apart else (rows, groups)
    codes = torch.empty(*shape, heads // groups * dim, dtype=torch.float8_e4m3fn, device=o.device)
    scales = torch.empty(shape, device=o.device)
    if apart:
        codes, scales = codes.transpose(0, 1), scales.t()
    if rows:
        turned = 2 * turns.shape[1]
        _output_rows[(rows, groups)](
            o, torch.view_as_real(turns), codes, scales, groups, *scales.stride(), HEADS=heads // groups, D=dim,
            TURNED=turned, KEPT_BLOCK=triton.next_power_of_2(dim - turned),
        )  # fmt: skip
    return Fp8Rows(codes, scales)
