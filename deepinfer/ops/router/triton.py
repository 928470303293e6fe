"""Scores, choice and weights from the router's logits, one program a row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.ops.triton import block


@triton.jit
def _choose(logits_ptr, bias_ptr, chosen_ptr, weights_ptr, experts, bias_stride, scaling, COUNT: tl.constexpr,
            SLOTS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK)
    inside = e < experts
    x = tl.load(logits_ptr + row * experts + e, mask=inside, other=0.0)
    softplus = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))
    scores = tl.sqrt(softplus)
    ranked = tl.where(inside, scores + tl.load(bias_ptr + row * bias_stride + e, mask=inside, other=0.0), -float("inf"))
    slot = tl.arange(0, SLOTS)
    best = tl.zeros((SLOTS,), tl.int64)
    weights = tl.zeros((SLOTS,), tl.float32)
    for k in tl.static_range(COUNT):
        place = tl.argmax(ranked, 0)
        best = tl.where(slot == k, place.to(tl.int64), best)
        weights = tl.where(slot == k, tl.sum(tl.where(e == place, scores, 0.0), 0), weights)
        ranked = tl.where(e == place, -float("inf"), ranked)
    weights = weights / (tl.sum(weights, 0) + 1e-20) * scaling
    tl.store(chosen_ptr + row * COUNT + slot, best, mask=slot < COUNT)
    tl.store(weights_ptr + row * COUNT + slot, weights, mask=slot < COUNT)


def choose(logits: Tensor, bias: Tensor, count: int, scaling: float) -> tuple[Tensor, Tensor]:
    """logits FP32 [N, E], bias FP32 [E] or [N, E] -> (int64 [N, count], FP32 [N, count]); of equal ones the lower."""
    rows, experts = logits.shape
    chosen = torch.empty(rows, count, dtype=torch.int64, device=logits.device)
    weights = torch.empty(rows, count, device=logits.device)
    if rows:
        stride = bias.stride(0) if bias.ndim == 2 else 0
        _choose[(rows,)](
            logits, bias, chosen, weights, experts, stride, scaling, COUNT=count, SLOTS=block(count),
            BLOCK=block(experts),
        )  # fmt: skip
    return chosen, weights
