"""FP8 products on Hopper: rounding of activations, a split-K kernel for few rows, cuBLASLt for many."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from deepinfer.ops.linear.weights import Fp8Rows, Fp8Weight
from deepinfer.ops.triton import block, dot, narrow, row_scale, to_e4m3

FEW_ROWS, FEW_GROUPED_ROWS = 128, 256
"""Up to so many, a kernel with weights on the long side of the tensor cores beats the library's one or eight."""
_WIDE = 16384  # features: beyond, the library wins from 65 rows on
_LIBRARY_ROWS = 16  # it refuses some numbers of rows that are no multiple of this


@triton.jit
def _quantize(x_ptr, codes_ptr, scales_ptr, columns, stride, group, group_stride, BLOCK: tl.constexpr):
    """Rows whose columns come in groups of `group`, which lie `group_stride` apart."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    at = x_ptr + row * stride + (c // group).to(tl.int64) * group_stride + c % group
    x = tl.load(at, mask=c < columns, other=0.0).to(tl.float32)
    scale = row_scale(x)
    tl.store(codes_ptr + row * columns + c, to_e4m3(x / scale), mask=c < columns)
    tl.store(scales_ptr + row, scale)


def quantize_rows(x: Tensor) -> Fp8Rows:
    """As `torch.quantize_rows`; x [..., C], rows may be apart."""
    rows = x if x.ndim == 2 and x.stride(1) == 1 else x.reshape(-1, x.shape[-1])
    made = quantize_groups(rows[:, None])
    return Fp8Rows(made.codes.view(x.shape), made.scales.view(x.shape[:-1]))


def quantize_groups(x: Tensor) -> Fp8Rows:
    """x [N, G, C], rows and groups may be apart -> [N, G * C], a scale for all groups of a row."""
    rows, groups, width = x.shape
    codes = torch.empty(rows, groups * width, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, device=x.device)
    if rows:
        _quantize[(rows,)](
            x, codes, scales, groups * width, x.stride(0), width, x.stride(1), BLOCK=block(groups * width)
        )
    return Fp8Rows(codes, scales)


@triton.jit(do_not_specialize=["M"])
def _product(x_ptr, xs_ptr, w_ptr, ws_ptr, out_ptr, parts_ptr, M, GROUPS: tl.constexpr, N: tl.constexpr,
             K: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr,
             STAGES: tl.constexpr):  # fmt: skip
    """Per group out[M, N] = x[M, K] w[N, K]^T, times both scales: BN weight rows by BM tokens, one part of K."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    group = tl.program_id(1) % GROUPS
    m = tl.program_id(1) // GROUPS * BM + tl.arange(0, BM)
    split = tl.program_id(2)
    k = split * (K // SPLIT) + tl.arange(0, BK)
    w_p = w_ptr + (group * N + n)[:, None].to(tl.int64) * K + k[None, :]
    x_p = x_ptr + (m * GROUPS + group)[:, None].to(tl.int64) * K + k[None, :]
    inside = m < M
    acc = tl.zeros((BN, BM), tl.float32)
    for _ in tl.range(0, K // SPLIT // BK, num_stages=STAGES):
        acc = dot(tl.load(w_p), tl.trans(tl.load(x_p, mask=inside[:, None], other=0.0)), acc)
        w_p += BK
        x_p += BK
    acc *= tl.load(ws_ptr + group * N + n)[:, None]
    acc *= tl.load(xs_ptr + m * GROUPS + group, mask=inside, other=0.0)[None, :]
    at = (m * GROUPS + group)[:, None] * N + n[None, :]
    if SPLIT == 1:
        tl.store(out_ptr + at, narrow(tl.trans(acc)).to(tl.bfloat16), mask=inside[:, None])
    else:
        tl.store(parts_ptr + split.to(tl.int64) * M * GROUPS * N + at, tl.trans(acc), mask=inside[:, None])


@triton.jit
def _add_parts(parts_ptr, out_ptr, size, SPLIT: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(SPLIT):
        total += tl.load(parts_ptr + split * size + i, mask=i < size, other=0.0)
    tl.store(out_ptr + i, narrow(total).to(tl.bfloat16), mask=i < size)


def _few(x: Fp8Rows, weight: Fp8Weight) -> Tensor:
    """x [M, G, C], weight [G, R, C] -> BF16 [M, G, R]."""
    rows, groups, depth = x.codes.shape
    x = Fp8Rows(x.codes.contiguous(), x.scales.contiguous())
    width = weight.shape[1]
    tokens = 16 if rows <= 16 else 32 if rows <= 32 else 64 if rows <= 64 else 128
    shallow = depth < 2048 and tokens > 16
    step = 256 if depth % 256 == 0 and not shallow else 128 if depth % 128 == 0 else 32
    features = 64 if width % 64 == 0 else 32 if width % 32 == 0 else 16
    tiles = width // features * groups * triton.cdiv(rows, tokens)
    steps = depth // step
    stages = 5 if tokens in (32, 64) and not shallow else 4
    enough = 100 if tokens == 16 else 70  # parts cost more than what more blocks gain
    split = next((s for s in range(1, steps + 1) if steps % s == 0 and tiles * s >= enough), steps)
    split = min(split, 16) if steps % min(split, 16) == 0 else 1
    out = torch.empty(rows, groups, width, dtype=torch.bfloat16, device=x.codes.device)
    parts = torch.empty(split, rows, groups, width, device=out.device) if split > 1 else None
    _product[(width // features, triton.cdiv(rows, tokens) * groups, split)](
        x.codes, x.scales, weight.codes, weight.scales, out, parts, rows, GROUPS=groups, N=width, K=depth,
        BN=features, BM=tokens, BK=step, SPLIT=split, STAGES=stages, num_warps=4,
    )  # fmt: skip
    if split > 1:
        _add_parts[(triton.cdiv(out.numel(), 512),)](parts, out, out.numel(), SPLIT=split, BLOCK=512)
    return out


def linear(x: Fp8Rows, weight: Fp8Weight) -> Tensor:
    """x [..., C], weight [R, C] -> BF16 [..., R]."""
    codes, scales = x.codes.view(-1, x.codes.shape[-1]), x.scales.view(-1)
    if len(codes) <= (FEW_ROWS if len(weight) <= _WIDE else FEW_ROWS // 2):
        made = _few(Fp8Rows(codes[:, None], scales[:, None]), Fp8Weight(weight.codes[None], weight.scales[None]))[:, 0]
    else:
        made = _library(codes, scales, weight)
    return made.view(*x.codes.shape[:-1], len(weight))


def grouped_linear(x: Fp8Rows, weight: Fp8Weight) -> Tensor:
    """x [N, G, C], weight [G, R, C] -> BF16 [N, G, R]; many rows best lie group by group, as the result then does."""
    if len(x.codes) <= FEW_GROUPED_ROWS:
        return _few(x, weight)
    out = torch.empty(len(weight), len(x.codes), weight.shape[1], dtype=torch.bfloat16, device=x.codes.device)
    for group, made in enumerate(out):
        _library(x.codes[:, group].contiguous(), x.scales[:, group].contiguous(), weight[group], made)
    return out.transpose(0, 1)


def _library(codes: Tensor, scales: Tensor, weight: Fp8Weight, out: Tensor | None = None) -> Tensor:
    rows = len(codes)
    missing = -rows % _LIBRARY_ROWS
    if missing:
        codes = functional.pad(codes.view(torch.uint8), (0, 0, 0, missing)).view(codes.dtype)
        made = _library(codes, functional.pad(scales, (0, missing)), weight)[:rows]
        return made if out is None else out.copy_(made)
    if out is None:
        out = torch.empty(rows, len(weight), dtype=torch.bfloat16, device=codes.device)
    return torch._scaled_mm(
        codes,
        weight.codes.t(),
        scale_a=scales[:, None],
        scale_b=weight.scales[None],
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
        out=out,
    )
