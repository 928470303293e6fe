"""Normalisation of BF16 rows, one program a row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.ops.triton import block, narrow


@triton.jit
def _rms_norm(x_ptr, weight_ptr, out_ptr, columns, stride, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride + c, mask=c < columns, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / columns + eps)
    made = x * scale * tl.load(weight_ptr + c, mask=c < columns, other=0.0)
    tl.store(out_ptr + row * columns + c, narrow(made).to(tl.bfloat16), mask=c < columns)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [N, C], rows may be apart -> [N, C] in the dtype of x, which is BF16."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if len(x):
        _rms_norm[(len(x),)](x, weight, out, x.shape[1], x.stride(0), eps, BLOCK=block(x.shape[1]))
    return out
