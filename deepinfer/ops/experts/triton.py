"""The activation between the shared expert's products, with the rounding that the second one takes."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.ops.linear import Fp8Rows
from deepinfer.ops.triton import block, narrow, row_scale, to_e4m3


@triton.jit
def _activate(x_ptr, codes_ptr, scales_ptr, width, limit, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    inside = c < width
    gate = tl.minimum(tl.load(x_ptr + row * 2 * width + c, mask=inside, other=0.0).to(tl.float32), limit)
    up = tl.load(x_ptr + row * 2 * width + width + c, mask=inside, other=0.0).to(tl.float32)
    made = gate / (1.0 + tl.exp(-gate)) * tl.minimum(tl.maximum(up, -limit), limit)
    made = narrow(made)
    scale = row_scale(made)
    tl.store(codes_ptr + row * width + c, to_e4m3(made / scale), mask=inside)
    tl.store(scales_ptr + row, scale)


def activate(gate_up: Tensor, limit: float) -> Fp8Rows:
    """BF16 [N, 2I], gate then up -> SwiGLU in BF16, rounded: [N, I]."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    codes = torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=gate_up.device)
    scales = torch.empty(rows, device=gate_up.device)
    if rows:
        _activate[(rows,)](gate_up, codes, scales, width, limit, BLOCK=block(width))
    return Fp8Rows(codes, scales)
