"""Training operators that only exist on a GPU, against the reference. Run with scripts/gpu_tests.sh."""

import pytest
import torch

from deepinfer.reference import experts, hyper
from train.grouped_experts import fast_routed_experts
from train.operators import OPS

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("count", [1, 63, 64, 1000])
@pytest.mark.parametrize("spread", [0.1, 3.0])
def test_sinkhorn_kernels_equal_the_reference(count: int, spread: float) -> None:
    from train.sinkhorn import Sinkhorn

    scores = (torch.randn(count, 4, 4, device="cuda") * spread).requires_grad_()
    other = scores.detach().clone().requires_grad_()
    upstream = torch.randn_like(scores)
    expected = hyper.sinkhorn(scores, 20, 1e-6)
    expected.backward(upstream)
    found = Sinkhorn.apply(other, 20, 1e-6)
    found.backward(upstream)
    assert torch.allclose(found, expected, atol=1e-6)
    assert scores.grad is not None
    assert other.grad is not None
    assert torch.allclose(other.grad, scores.grad, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 7, 512])
def test_grouped_experts_equal_the_reference(rows: int) -> None:
    torch.manual_seed(rows)
    count, hidden, inner = 16, 64, 32
    x = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16)
    w1, w3 = (torch.randn(count, inner, hidden, device="cuda", dtype=torch.bfloat16) / 8 for _ in range(2))
    w2 = torch.randn(count, hidden, inner, device="cuda", dtype=torch.bfloat16) / 8
    chosen = torch.rand(rows, count, device="cuda").topk(3).indices
    weights = torch.rand(rows, 3, device="cuda")
    expected = experts.routed_experts(x, chosen, weights, w1, w2, w3, 10.0)
    found = fast_routed_experts(x, chosen, weights, w1, w2, w3, 10.0)
    assert torch.allclose(found.float(), expected.float(), atol=0.05, rtol=0.05)


def test_cache_roundings_compile_to_the_same_bits() -> None:
    x = torch.randn(256, 128, device="cuda", dtype=torch.bfloat16) * torch.logspace(-4, 4, 256, device="cuda")[:, None]
    for name in ("window_fp8", "latent_nvfp4", "index_mxfp4"):
        plain = getattr(OPS, name)
        assert torch.equal(torch.compile(plain, dynamic=False)(x), plain(x)), name
