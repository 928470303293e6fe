"""Normalisation of BF16 rows, one program a row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.ops.linear import Fp8Rows
from deepinfer.ops.triton import block, narrow, row_scale, to_e4m3


@triton.jit
def _rms_norm(x_ptr, weight_ptr, out_ptr, scales_ptr, columns, stride, eps, ROUND: tl.constexpr,
              BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride + c, mask=c < columns, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / columns + eps)
    made = x * scale * tl.load(weight_ptr + c, mask=c < columns, other=0.0)
    made = narrow(made)
    if ROUND:
        rounded = row_scale(made)
        tl.store(out_ptr + row * columns + c, to_e4m3(made / rounded), mask=c < columns)
        tl.store(scales_ptr + row, rounded)
    else:
        tl.store(out_ptr + row * columns + c, made.to(tl.bfloat16), mask=c < columns)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [N, C], rows may be apart -> [N, C] in the dtype of x, which is BF16."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if len(x):
        _rms_norm[(len(x),)](x, weight, out, None, x.shape[1], x.stride(0), eps, ROUND=False, BLOCK=block(x.shape[1]))
    return out


def rounded_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Fp8Rows:
    """As `torch.rounded_rms_norm`; x BF16 [N, C], rows may be apart."""
    codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(len(x), device=x.device)
    if len(x):
        _rms_norm[(len(x),)](
            x, weight, codes, scales, x.shape[1], x.stride(0), eps, ROUND=True, BLOCK=block(x.shape[1])
        )
    return Fp8Rows(codes, scales)
