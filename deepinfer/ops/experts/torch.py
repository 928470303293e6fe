"""The PyTorch version: defines the operator, on any device."""

import torch
from torch import Tensor
from torch.nn import functional


def swiglu(gate_up: Tensor, limit: float) -> Tensor:
    """[..., 2I], gate then up, of any float dtype -> FP32 [..., I]."""
    width = gate_up.shape[-1] // 2
    gate, up = gate_up[..., :width].float(), gate_up[..., width:].float()
    return functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def shared_expert(x: Tensor, w13: Tensor, w2: Tensor, limit: float) -> Tensor:
    """x [N, H], w13 [2I, H], w2 [H, I] -> [N, H]."""
    return functional.linear(swiglu(functional.linear(x, w13), limit).to(x.dtype), w2)


def routed_experts(x: Tensor, chosen: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, limit: float) -> Tensor:
    """x [N, H], chosen int64 [N, K], weights FP32 [N, K], w13 [E, 2I, H], w2 [E, H, I] -> [N, H].

    Visits are sorted by expert, so that each used expert is one product.
    """
    rows, count = chosen.shape
    order = chosen.flatten().argsort(stable=True)
    visits = chosen.flatten().bincount(minlength=len(w13)).tolist()
    gate_up = _grouped(x[order // count], w13, visits)
    inner = (swiglu(gate_up, limit) * weights.flatten()[order, None]).to(x.dtype)
    results = torch.empty(rows * count, x.shape[1], dtype=x.dtype, device=x.device)
    results[order] = _grouped(inner, w2, visits)
    return results.view(rows, count, x.shape[1]).sum(1, dtype=torch.float32).to(x.dtype)


def _grouped(x: Tensor, weight: Tensor, visits: list[int]) -> Tensor:
    """Rows x [A, in], sorted by expert, times each expert's weight [E, out, in] -> [A, out]."""
    out = torch.empty(len(x), weight.shape[1], dtype=x.dtype, device=x.device)
    end = 0
    for expert, visited in enumerate(visits):
        if visited:
            begin, end = end, end + visited
            torch.mm(x[begin:end], weight[expert].T, out=out[begin:end])
    return out
