"""The PyTorch version: defines the operator, on any device."""

import torch
from torch import Tensor
from torch.nn import functional

from deepinfer.ops.experts.weights import Experts, Fp4Experts
from deepinfer.ops.linear import Fp8Weight, Weight, linear, quantize_rows
from deepinfer.ops.linear.torch import fp8_product


def swiglu(gate_up: Tensor, limit: float) -> Tensor:
    """[..., 2I], gate then up, of any float dtype -> FP32 [..., I]."""
    width = gate_up.shape[-1] // 2
    gate, up = gate_up[..., :width].float(), gate_up[..., width:].float()
    return functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def shared_expert(x: Tensor, w13: Weight, w2: Weight, limit: float) -> Tensor:
    """x [N, H], w13 [2I, H], w2 [H, I] -> [N, H]."""
    return linear(swiglu(linear(x, w13), limit).to(x.dtype), w2)


def routed_experts(x: Tensor, chosen: Tensor, weights: Tensor, w13: Experts, w2: Experts, limit: float) -> Tensor:
    """x [N, H], chosen int64 [N, K], weights FP32 [N, K], w13 [E, 2I, H], w2 [E, H, I] -> [N, H].

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
        results[order] = _grouped(activated.to(x.dtype), w2, visits, routing)
    return combine(results.view(rows, count, x.shape[1]))


def every_expert(x: Tensor, chosen: Tensor, weights: Tensor, w13: Experts, w2: Experts, limit: float) -> Tensor:
    """As `routed_experts`, with all rows through all experts: no look from the host, and cheap where both are few.

    w13, w2: tensors or `Fp8Weight`.
    """
    routing = torch.zeros(len(x), len(w13), device=x.device).scatter_(1, chosen, weights).t()[:, :, None]
    activated = swiglu(_products(x[None], w13).to(x.dtype), limit)
    if isinstance(w2, Tensor):
        results = _products((activated * routing).to(x.dtype), w2)
    else:
        results = (_products(activated.to(x.dtype), w2) * routing).to(x.dtype)
    return results.sum(0, dtype=torch.float32).to(x.dtype)


def _products(x: Tensor, weight: Experts) -> Tensor:
    """x [E, N, in] (or 1 for E), weight [E, out, in] -> [E, N, out] of any float dtype."""
    if isinstance(weight, Tensor):
        return torch.matmul(x, weight.transpose(1, 2))
    assert isinstance(weight, Fp8Weight), "FP4 experts have kernels"
    codes, scales = quantize_rows(x)
    products = torch.matmul(codes.float(), weight.codes.float().transpose(1, 2))
    return products * weight.scales[:, None] * scales[..., None]


def combine(results: Tensor) -> Tensor:
    """The results of each row's visits [N, K, H] -> their sum [N, H]."""
    return results.sum(1, dtype=torch.float32).to(results.dtype)


def _grouped(x: Tensor, weight: Experts, visits: list[int], routing: Tensor | None = None) -> Tensor:
    """Rows x [A, in], sorted by expert, times each expert's weight [E, out, in] and a factor a row -> [A, out]."""
    out = torch.empty(len(x), weight.shape[1], dtype=x.dtype, device=x.device)
    end = 0
    for expert, visited in enumerate(visits):
        if visited:
            begin, end = end, end + visited
            if isinstance(weight, Tensor):
                torch.mm(x[begin:end], weight[expert].T, out=out[begin:end])
            else:
                product = _quantized(x[begin:end], weight, expert)
                out[begin:end] = product if routing is None else product * routing[begin:end]
    return out


def _quantized(x: Tensor, weight: Fp8Weight | Fp4Experts, expert: int) -> Tensor:
    """x [A, in] -> FP32 [A, out]."""
    codes, scales = quantize_rows(x)
    if isinstance(weight, Fp8Weight):
        return fp8_product(codes, scales, weight[expert])
    return functional.linear(codes.float(), weight.dequantized(expert)) * scales[:, None]
