"""Routing and experts against dense loops."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from random_models import tiny
from torch import Tensor

from deepinfer.config.model import ModelConfig
from deepinfer.reference.experts import MixtureOfExperts, Router, route, routed_experts, swiglu


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class TestRoute:
    @given(st.integers(0, 100), st.integers(1, 5))
    def test_weights_are_the_normalised_scores(self, seed: int, count: int) -> None:
        scores, bias = randn(3, 6, seed=seed).abs() + 0.1, randn(3, 6, seed=seed + 1)
        chosen, weights = route(scores, bias, count, 1.5, normalise=True)
        for row in range(3):
            order = sorted(range(6), key=lambda e: -(scores[row, e] + bias[row, e]).item())[:count]
            assert set(chosen[row].tolist()) == set(order)
            total = sum(scores[row, e].item() for e in order)
            expected = [scores[row, e].item() / total * 1.5 for e in chosen[row].tolist()]
            assert weights[row].tolist() == pytest.approx(expected, rel=1e-5)

    def test_the_bias_selects_but_does_not_weigh(self) -> None:
        scores = torch.tensor([[0.5, 0.4, 0.3, 0.2]])
        chosen, weights = route(scores, torch.tensor([[0.0, 0, 0, 100.0]]), 2, 1.5, normalise=True)
        assert chosen.tolist() == [[3, 0]]
        assert weights[0].tolist() == pytest.approx([0.2 / 0.7 * 1.5, 0.5 / 0.7 * 1.5])

    def test_without_normalising_the_scores_are_scaled(self) -> None:
        _, weights = route(torch.tensor([[0.5, 0.4]]), torch.zeros(1, 2), 1, 1.5, normalise=False)
        assert weights[0].tolist() == pytest.approx([0.75])


class TestRouter:
    router = Router(ModelConfig.from_dict(tiny(), "test"), 6)
    router.weight.data = randn(6, 64)
    router.bias.data, router.bias_vl.data = randn(6, seed=1), randn(6, seed=2)

    def test_scores_formula(self) -> None:
        h = randn(2, 64, seed=3) * 3
        scores, _ = self.router(h, torch.zeros(2, dtype=torch.bool))
        for row in range(2):
            for e in range(6):
                product = (self.router.weight[e].double() @ h[row].double()).item()
                assert scores[row, e].item() == pytest.approx(math.sqrt(math.log1p(math.exp(product))), rel=1e-4)

    def test_image_tokens_have_their_own_bias(self) -> None:
        _, bias = self.router(randn(3, 64), torch.tensor([False, True, False]))
        assert torch.equal(bias, torch.stack((self.router.bias, self.router.bias_vl, self.router.bias)))

    def test_scores_are_fp32_in_a_bf16_run(self) -> None:
        h = randn(2, 64).bfloat16()
        scores, _ = self.router(h, torch.zeros(2, dtype=torch.bool))
        assert torch.equal(scores, self.router(h.float(), torch.zeros(2, dtype=torch.bool))[0])


def test_swiglu_clamps_the_gate_above_and_the_rest_on_both_sides() -> None:
    gate, up = torch.tensor([-9.0, 1.0, 9.0]), torch.tensor([9.0, -9.0, 1.0])
    expected = [silu * clipped for silu, clipped in zip((_silu(-9), _silu(1), _silu(2)), (2, -2, 1), strict=True)]
    assert swiglu(gate, up, 2.0).tolist() == pytest.approx(expected)


def _silu(x: float) -> float:
    return x / (1 + math.exp(-x))


class TestRoutedExperts:
    @pytest.mark.parametrize("tokens", [1, 7])
    def test_against_all_experts_on_all_rows(self, tokens: int) -> None:
        x, w1, w2, w3 = randn(tokens, 8), randn(5, 6, 8, seed=1), randn(5, 8, 6, seed=2), randn(5, 6, 8, seed=3)
        chosen = torch.stack([torch.randperm(5, generator=torch.Generator().manual_seed(t))[:2] for t in range(tokens)])
        weights = randn(tokens, 2, seed=4).abs()
        dense = torch.zeros(tokens, 5).scatter(1, chosen, weights)
        expected = sum(dense[:, e, None] * (swiglu(x @ w1[e].T, x @ w3[e].T, 1.0) @ w2[e].T) for e in range(5))
        torch.testing.assert_close(routed_experts(x, chosen, weights, w1, w2, w3, 1.0), expected)

    def test_the_weight_multiplies_before_the_last_rounding_to_bf16(self) -> None:
        x, w1, w2, w3 = (randn(*s, seed=i).bfloat16() for i, s in enumerate([(1, 8), (1, 6, 8), (1, 8, 6), (1, 6, 8)]))
        weights = torch.tensor([[0.3]])
        inner = (swiglu(x @ w1[0].T, x @ w3[0].T, 1.0) * 0.3).bfloat16()
        found = routed_experts(x, torch.zeros(1, 1, dtype=torch.int64), weights, w1, w2, w3, 1.0)
        assert torch.equal(found, inner @ w2[0].T)


def test_layer_adds_the_shared_expert_to_every_token() -> None:
    config = ModelConfig.from_dict(tiny(), "test")
    layer = MixtureOfExperts(config, 6, 2)
    for index, parameter in enumerate(layer.parameters()):
        parameter.data = randn(*parameter.shape, seed=index) * 0.1
    h, images = randn(2, 3, 64), torch.tensor([[False, False, True], [True, False, False]])
    shared = layer.shared_experts(h)
    for b in range(2):
        for t in range(3):
            row = h[b, t : t + 1]
            scores, bias = layer.gate(row, images[b, t : t + 1])
            alone = layer.experts(row, *route(scores, bias, 2, config.routed_scaling_factor, True))
            torch.testing.assert_close(layer(h, images)[b, t], alone[0] + shared[b, t])
