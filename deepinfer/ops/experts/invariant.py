"""The batch-invariant version."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from deepinfer.ops.experts.weights import Experts, Fp4Experts
from deepinfer.ops.invariance import elementwise, ordered_sum, product
from deepinfer.ops.linear import Fp8Weight, Weight, quantize_rows
from deepinfer.ops.linear.invariant import fp8_product, linear


def swiglu(gate_up: Tensor, limit: float) -> Tensor:
    """[..., 2I], gate then up, of any float dtype -> FP32 [..., I]."""
    width = gate_up.shape[-1] // 2
    gate, up = gate_up[..., :width].float(), gate_up[..., width:].float()
    return elementwise(functional.silu, gate.clamp(max=limit)) * up.clamp(-limit, limit)


def shared_expert(x: Tensor, w13: Weight, w2: Weight, limit: float) -> Tensor:
    """x [N, H], w13 [2I, H], w2 [H, I] -> [N, H]."""
    return linear(swiglu(linear(x, w13), limit).to(x.dtype), w2)


def routed_experts(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    w13: Experts,
    w2: Experts,
    limit: float,
    base: Callable[[], Tensor] | None = None,
) -> Tensor:
    """x [N, H], chosen int64 [N, K], weights FP32 [N, K], w13 [E, 2I, H], w2 [E, H, I], base() [N, H] -> [N, H].

    Visits are sorted by expert, so that each used expert is one product.
    """
    rows, count = chosen.shape
    order = chosen.flatten().argsort(stable=True)
    visits = chosen.flatten().bincount(minlength=len(w13)).tolist()
    routing = weights.flatten()[order, None]
    activated = swiglu(_grouped(x[order // count], w13, visits), limit)
    results = torch.empty(rows * count, x.shape[1], dtype=x.dtype, device=x.device)
    if isinstance(w2, Tensor):
        results[order] = _grouped((activated * routing).to(x.dtype), w2, visits)
    else:
        results[order] = (_grouped(activated.to(x.dtype), w2, visits, torch.float32) * routing).to(x.dtype)
    routed = combine(results.view(rows, count, x.shape[1]))
    return routed if base is None else routed + base()


def combine(results: Tensor) -> Tensor:
    """The results of each row's visits [N, K, H] -> their sum [N, H]."""
    return ordered_sum(results.float(), 1).to(results.dtype)


def _grouped(x: Tensor, weight: Experts, visits: list[int], dtype: torch.dtype | None = None) -> Tensor:
    """Rows x [A, in], sorted by expert, times each expert's weight [E, out, in] -> [A, out] of `dtype` (that of x)."""
    made, end = [x.new_empty(0, weight.shape[1], dtype=dtype)], 0
    dense = weight.transpose(1, 2).unbind() if isinstance(weight, Tensor) else None
    for expert, visited in enumerate(visits):
        if visited:
            begin, end = end, end + visited
            rows = x[begin:end]
            made.append(_quantized(rows, weight, expert) if dense is None else product(rows, dense[expert]))
    return torch.cat(made).to(dtype or x.dtype)


def _quantized(x: Tensor, weight: Experts, expert: int) -> Tensor:
    """x [A, in] -> FP32 [A, out]."""
    codes, scales = quantize_rows(x)
    if isinstance(weight, Fp8Weight):
        return fp8_product(codes, scales, weight[expert])
    assert isinstance(weight, Fp4Experts)
    return product(codes.float(), weight.dequantized(expert).T) * scales[:, None]
