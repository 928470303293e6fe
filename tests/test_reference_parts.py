"""Rotary positions, norms, residual streams and roundings against their formulas, written out in Python floats."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from released_config import released
from torch import Tensor

from deepinfer.checkpoint import formats
from deepinfer.config.model import ModelConfig, RopeScaling
from deepinfer.reference import rounding
from deepinfer.reference.hyper import Mix, coefficients, collapse, expand, sinkhorn
from deepinfer.reference.norm import Linear, rms_norm
from deepinfer.reference.rotary import _yarn, frequencies, rotate


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class TestRotary:
    def test_equals_complex_multiplication(self) -> None:
        x, freqs, positions = randn(2, 5, 3, 20), torch.tensor([1.0, 0.3, 0.01]), torch.tensor([0, 1, 7, 100, 4000])
        pairs = torch.view_as_complex(x[..., 14:].double().reshape(2, 5, 3, 3, 2))
        turn = torch.polar(torch.ones(5, 1, 3).double(), positions[:, None, None].double() * freqs.double())
        expected = torch.cat((x[..., :14].double(), torch.view_as_real(pairs * turn).flatten(-2)), dim=-1)
        torch.testing.assert_close(rotate(x, positions[:, None], freqs).double(), expected, atol=5e-4, rtol=0)
        near = rotate(x[:, :3], positions[:3, None], freqs).double()
        torch.testing.assert_close(near, expected[:, :3], atol=1e-6, rtol=1e-5)

    def test_leaves_the_first_channels_alone(self) -> None:
        x = randn(4, 20)
        assert torch.equal(rotate(x, torch.arange(4), torch.ones(3))[:, :14], x[:, :14])

    @given(st.integers(0, 10_000), st.integers(0, 10))
    def test_inverse_undoes(self, position: int, seed: int) -> None:
        x, at, freqs = randn(1, 8, seed=seed), torch.tensor([position]), torch.tensor([1.0, 0.1])
        torch.testing.assert_close(rotate(rotate(x, at, freqs), at, freqs, inverse=True), x, atol=1e-5, rtol=1e-5)

    @given(st.integers(0, 200), st.integers(0, 200), st.integers(0, 200))
    def test_products_depend_on_the_distance_only(self, t: int, s: int, shift: int) -> None:
        q, k, freqs = randn(1, 8, seed=1), randn(1, 8, seed=2), torch.tensor([0.5, 0.1, 0.02, 0.003])

        def product(a: int, b: int) -> Tensor:
            return (rotate(q, torch.tensor([a]), freqs) * rotate(k, torch.tensor([b]), freqs)).sum()

        torch.testing.assert_close(product(t, s), product(t + shift, s + shift), atol=1e-4, rtol=1e-4)

    def test_keeps_the_dtype_and_computes_in_fp32(self) -> None:
        x = randn(1, 8).bfloat16()
        out = rotate(x, torch.tensor([3]), torch.tensor([1.0, 0.1]))
        assert out.dtype is torch.bfloat16
        wide = rotate(x.float(), torch.tensor([3]), torch.tensor([1.0, 0.1]))
        assert torch.equal(out, wide.bfloat16())


class TestFrequencies:
    config = ModelConfig.from_dict(released(), "test")

    def test_window_layers_are_unscaled(self) -> None:
        expected = [10000.0 ** (-2 * i / 64) for i in range(32)]
        torch.testing.assert_close(frequencies(self.config, compressed=False), torch.tensor(expected))

    def test_compressed_layers_are_interpolated(self) -> None:
        expected = []
        low = max(math.floor(64 * math.log(65536 / (32 * 2 * math.pi)) / (2 * math.log(160000))), 0)
        high = min(math.ceil(64 * math.log(65536 / (1 * 2 * math.pi)) / (2 * math.log(160000))), 63)
        assert 0 < low < high < 32
        for i in range(32):
            plain = 160000.0 ** (-2 * i / 64)
            ramp = min(max((i - low) / (high - low), 0), 1)
            expected.append(plain / 16 * ramp + plain * (1 - ramp))
        found = frequencies(self.config, compressed=True)
        torch.testing.assert_close(found, torch.tensor(expected))
        plain = 160000.0 ** (-torch.arange(0, 64, 2).double() / 64)
        torch.testing.assert_close(found[: low + 1], plain[: low + 1].float())
        torch.testing.assert_close(found[high:], (plain[high:] / 16).float())

    def test_without_scaling_the_compressed_layers_only_change_theta(self) -> None:
        data = released()
        data["text_config"]["rope_scaling"] = None
        found = frequencies(ModelConfig.from_dict(data, "test"), compressed=True)
        torch.testing.assert_close(found, torch.tensor([160000.0 ** (-2 * i / 64) for i in range(32)]))

    def test_bounds_that_meet_make_a_step(self) -> None:
        """A short context clips both correction dims to 0: every pair but the first is slow."""
        plain = torch.tensor([1.0, 0.1, 0.01]).double()
        scaling = RopeScaling(factor=4.0, beta_fast=1.0, beta_slow=1.0, original_max_position_embeddings=6)
        assert _yarn(plain, 10000.0, 6, scaling).tolist() == pytest.approx([1.0, 0.025, 0.0025])


class TestNorm:
    def test_formula(self) -> None:
        x, weight = randn(3, 7), randn(7, seed=1)
        wide = x.double()
        expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-20).sqrt() * weight.double()
        torch.testing.assert_close(rms_norm(x, weight, 1e-20).double(), expected)

    def test_zero_rows_give_zeros(self) -> None:
        assert torch.equal(rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-20), torch.zeros(2, 8))

    def test_casts_once(self) -> None:
        x, weight = randn(3, 7).bfloat16(), randn(7, seed=1).bfloat16()
        assert torch.equal(rms_norm(x, weight, 1e-6), rms_norm(x.float(), weight.float(), 1e-6).bfloat16())

    def test_linear_follows_its_input(self) -> None:
        linear = Linear(4, 3, bias=True)
        linear.weight.data, linear.bias.data = randn(3, 4), randn(3, seed=1)
        x = randn(2, 4, seed=2)
        torch.testing.assert_close(linear(x), x @ linear.weight.T + linear.bias)
        assert linear(x.bfloat16()).dtype is torch.bfloat16


def python_sinkhorn(rows: list[list[float]], iterations: int, eps: float) -> list[list[float]]:
    size = range(len(rows))
    peaks = [max(row) for row in rows]
    comb = [[math.exp(v - peak) for v in row] for row, peak in zip(rows, peaks, strict=True)]
    comb = [[v / sum(row) + eps for v in row] for row in comb]
    for step in range(iterations):
        if step:
            comb = [[v / (sum(row) + eps) for v in row] for row in comb]
        sums = [sum(comb[r][s] for r in size) + eps for s in size]
        comb = [[comb[r][s] / sums[s] for s in size] for r in size]
    return comb


class TestHyperConnections:
    @pytest.mark.parametrize("iterations", [1, 2, 20])
    def test_sinkhorn_formula(self, iterations: int) -> None:
        scores = randn(2, 4, 4) * 2
        expected = torch.tensor([python_sinkhorn(s.tolist(), iterations, 1e-6) for s in scores])
        torch.testing.assert_close(sinkhorn(scores, iterations, 1e-6), expected)

    @given(st.lists(st.floats(-4, 4), min_size=16, max_size=16))
    def test_sinkhorn_is_doubly_stochastic(self, values: list[float]) -> None:
        comb = sinkhorn(torch.tensor(values).view(1, 4, 4), 20, 1e-6)[0]
        assert bool((comb > 0).all())
        torch.testing.assert_close(comb.sum(0), torch.ones(4), atol=1e-4, rtol=0)  # columns are normalised last
        torch.testing.assert_close(comb.sum(1), torch.ones(4), atol=2e-2, rtol=0)

    def test_coefficients_formula(self) -> None:
        x, fn, base = randn(3, 2, 5), randn(8, 10, seed=1), randn(8, seed=2)
        scale = torch.tensor([0.5, 1.5, 2.0])
        mix = coefficients(x, fn, base, scale, 1e-6, 1e-3, 4)
        for row in range(3):
            flat = x[row].flatten().tolist()
            root = 1 / math.sqrt(sum(v * v for v in flat) / 10 + 1e-6)
            z = [sum(a * b for a, b in zip(fn[i].tolist(), flat, strict=True)) * root for i in range(8)]
            z = [base[i].item() + z[i] * scale[[0, 0, 1, 1, 2, 2, 2, 2][i]].item() for i in range(8)]
            sigmoid = [1 / (1 + math.exp(-v)) for v in z]
            assert mix.pre[row].tolist() == pytest.approx([v + 1e-3 for v in sigmoid[:2]], rel=1e-5)
            assert mix.post[row].tolist() == pytest.approx([2 * v for v in sigmoid[2:4]], rel=1e-5)
            expected = python_sinkhorn([z[4:6], z[6:8]], 4, 1e-3)
            torch.testing.assert_close(mix.comb[row], torch.tensor(expected))

    def test_collapse_and_expand_formulas(self) -> None:
        x, y, pre, post, comb = randn(4, 5), randn(5, seed=1), randn(4, seed=2), randn(4, seed=3), randn(4, 4, seed=4)
        torch.testing.assert_close(collapse(x, pre), sum(pre[s] * x[s] for s in range(4)))
        out = expand(y, x, Mix(pre, post, comb))
        for s in range(4):
            torch.testing.assert_close(out[s], post[s] * y + sum(comb[r, s] * x[r] for r in range(4)))


@pytest.mark.parametrize("name", ["window_fp8", "latent_nvfp4", "index_mxfp4"])
class TestRoundings:
    def test_value_is_the_round_trip(self, name: str) -> None:
        x = randn(5, 64)
        expected = getattr(formats, name)(x)
        assert torch.equal(getattr(rounding, name)(x), expected)
        # With a gradient the value goes through x + (rounded - x), which may cost the last bit.
        torch.testing.assert_close(getattr(rounding, name)(x.requires_grad_()).detach(), expected, atol=1e-6, rtol=1e-6)

    def test_gradient_passes_straight_through(self, name: str) -> None:
        x, weight = randn(5, 64).requires_grad_(), randn(5, 64, seed=1)
        (getattr(rounding, name)(x) * weight).sum().backward()
        assert torch.equal(x.grad, weight)
