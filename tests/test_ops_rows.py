"""Operators on independent rows against the reference's, over sizes with none, one and many rows."""

import pytest
import torch
from released_config import golden, small
from torch import Tensor

from deepinfer.config.model import ModelConfig, RopeScaling
from deepinfer.ops import compressor, engram, experts, hyper_connections, norm, rope, router
from deepinfer.reference import compressor as reference_compressor
from deepinfer.reference import engram as reference_engram
from deepinfer.reference import experts as reference_experts
from deepinfer.reference import hyper as reference_hyper
from deepinfer.reference import norm as reference_norm
from deepinfer.reference import rotary as reference_rotary

COUNTS = [0, 1, 2, 7, 65]
each_count = pytest.mark.parametrize("count", COUNTS)
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(made: Tensor, wanted: Tensor, ulps: float = 1) -> None:
    """Equal but for the order of sums: within a few steps of the dtype, relative to the largest magnitude."""
    assert made.dtype is wanted.dtype
    assert made.shape == wanted.shape
    if wanted.numel():
        scale = wanted.float().abs().max().item()
        step = 2.0**-8 if wanted.dtype is torch.bfloat16 else 2.0**-20
        assert (made.float() - wanted.float()).abs().max().item() <= ulps * step * scale


@each_count
@each_dtype
def test_rms_norm(count: int, dtype: torch.dtype) -> None:
    x, weight = randn(count, 48, dtype=dtype), randn(48, seed=1)
    close(norm.rms_norm(x, weight, 1e-6), reference_norm.rms_norm(x, weight, 1e-6))


def test_rms_norm_of_zeros_is_zeros() -> None:
    assert norm.rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-20).eq(0).all()


class TestRope:
    @pytest.mark.parametrize("data", [golden, small], ids=["golden", "small"])
    @pytest.mark.parametrize("scaled", [False, True])
    def test_frequencies(self, data: object, scaled: bool) -> None:
        config = ModelConfig.from_dict(data(), "test")
        scaling = config.rope_scaling if scaled else None
        theta = config.compress_rope_theta if scaled else config.rope_theta
        made = rope.frequencies(config.qk_rope_head_dim, theta, scaling)
        close(made, reference_rotary.frequencies(config, compressed=scaled))

    @pytest.mark.parametrize("dim", [2, 16, 64])
    @pytest.mark.parametrize("betas", [(32, 1), (1, 1), (4, 0.1)])
    def test_interpolation_keeps_fast_and_divides_slow_frequencies(self, dim: int, betas: tuple[float, float]) -> None:
        scaling = RopeScaling(factor=16, beta_fast=betas[0], beta_slow=betas[1], original_max_position_embeddings=256)
        plain, scaled = rope.frequencies(dim, 10000.0), rope.frequencies(dim, 10000.0, scaling)
        ratio = plain / scaled
        assert bool((ratio >= 0.999).all() and (ratio <= 16.001).all())
        assert bool((ratio.diff() >= -1e-3).all())

    @each_count
    @each_dtype
    @pytest.mark.parametrize("inverse", [False, True])
    def test_rotate(self, count: int, dtype: torch.dtype, inverse: bool) -> None:
        x, freqs = randn(count, 3, 24, dtype=dtype), rope.frequencies(8, 100.0)
        positions = torch.arange(count) * 37
        turns = rope.rotations(positions, freqs)[:, None]
        made = rope.rotate(x, turns.conj() if inverse else turns)
        close(made, reference_rotary.rotate(x, positions[:, None], freqs, inverse))
        assert torch.equal(made[..., :16], x[..., :16])

    def test_all_channels_may_turn(self) -> None:
        x, freqs = randn(5, 8), rope.frequencies(8, 100.0)
        made = rope.rotate(x, rope.rotations(torch.arange(5), freqs))
        close(made, reference_rotary.rotate(x, torch.arange(5), freqs))


class TestHyperConnections:
    @each_count
    @each_dtype
    @pytest.mark.parametrize("streams", [1, 2, 4])
    def test_a_site(self, count: int, dtype: torch.dtype, streams: int) -> None:
        """Coefficients, collapse and expand, one after the other as a block uses them."""
        total = streams * (2 + streams)
        x, y = randn(count, streams, 32, dtype=dtype), randn(count, 32, seed=1, dtype=dtype)
        fn, base, scale = 0.1 * randn(total, streams * 32, seed=2), randn(total, seed=3), randn(3, seed=4)
        spread = scale.repeat_interleave(torch.tensor([streams, streams, streams * streams]))
        made = hyper_connections.coefficients(x, fn, base, spread, 1e-20, 1e-6, 20)
        wanted = reference_hyper.coefficients(x, fn, base, scale, 1e-20, 1e-6, 20)
        for name in ("pre", "post", "comb"):
            close(getattr(made, name), getattr(wanted, name), ulps=4)
        close(hyper_connections.collapse(x, wanted.pre), reference_hyper.collapse(x, wanted.pre))
        mix = hyper_connections.Mix(*wanted)
        close(hyper_connections.expand(y, x, mix), reference_hyper.expand(y, x, wanted))

    @pytest.mark.parametrize("iterations", [1, 2, 20])
    def test_sinkhorn(self, iterations: int) -> None:
        scores = 5 * randn(9, 4, 4)
        made = hyper_connections.sinkhorn(scores, iterations, 1e-6)
        close(made, reference_hyper.sinkhorn(scores, iterations, 1e-6), ulps=4)


class TestExperts:
    @each_count
    @each_dtype
    @pytest.mark.parametrize("biased", [False, True])
    def test_route(self, count: int, dtype: torch.dtype, biased: bool) -> None:
        h, weight = randn(count, 32, dtype=dtype), randn(8, 32, seed=1)
        bias = randn(count, 8, seed=2) if biased else randn(8, seed=2)
        chosen, weights = router.route(h, weight, bias, 3, 1.5)
        scores = torch.nn.functional.softplus(h.float() @ weight.T).sqrt()
        wanted, wanted_weights = reference_experts.route(scores, bias.expand(count, 8), 3, 1.5, True)
        assert torch.equal(chosen, wanted)
        close(weights, wanted_weights)

    @each_count
    @each_dtype
    @pytest.mark.parametrize("per_row", [1, 3])
    def test_routed_experts(self, count: int, dtype: torch.dtype, per_row: int) -> None:
        made, wanted = self.both(count, dtype, per_row, unused=())
        close(made, wanted, ulps=8)

    def test_experts_that_nobody_visits(self) -> None:
        for unused in ((0,), (5,), (1, 2, 3)):
            close(*self.both(30, torch.float32, 2, unused), ulps=8)

    def test_neighbours_do_not_matter(self) -> None:
        """A row alone and among others that make its experts' products longer: but for rounding, the same."""
        x, chosen, weights, w13, w2, _ = self.inputs(40, torch.float32, 3, ())
        together = experts.routed_experts(x, chosen, weights, w13, w2, 0.7)
        alone = [
            experts.routed_experts(x[i : i + 1], chosen[i : i + 1], weights[i : i + 1], w13, w2, 0.7) for i in range(40)
        ]
        close(together, torch.cat(alone), ulps=8)

    @each_dtype
    def test_shared_expert(self, dtype: torch.dtype) -> None:
        x, w1, w3, w2 = (
            randn(*shape, seed=i, dtype=dtype) for i, shape in enumerate([(5, 32), (16, 32), (16, 32), (32, 16)])
        )
        inner = reference_experts.swiglu(x @ w1.T, x @ w3.T, 0.7).to(dtype)
        close(experts.shared_expert(x, torch.cat((w1, w3)), w2, 0.7), inner @ w2.T, ulps=4)

    @staticmethod
    def inputs(count: int, dtype: torch.dtype, per_row: int, unused: tuple[int, ...]) -> tuple[Tensor, ...]:
        used = torch.tensor([expert for expert in range(6) if expert not in unused])
        generator = torch.Generator().manual_seed(3)
        picks = [used[torch.randperm(len(used), generator=generator)[:per_row]] for _ in range(count)]
        chosen = torch.stack(picks) if picks else torch.empty(0, per_row, dtype=torch.int64)
        w13, w2 = randn(6, 32, 24, seed=1, dtype=dtype), randn(6, 24, 16, seed=2, dtype=dtype)
        return randn(count, 24, dtype=dtype), chosen, randn(count, per_row, seed=4).abs(), w13, w2, used

    def both(self, count: int, dtype: torch.dtype, per_row: int, unused: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        x, chosen, weights, w13, w2, _ = self.inputs(count, dtype, per_row, unused)
        made = experts.routed_experts(x, chosen, weights, w13, w2, 0.7)
        wanted = reference_experts.routed_experts(x, chosen, weights, w13[:, :16], w2, w13[:, 16:], 0.7)
        return made, wanted


@pytest.mark.parametrize("pairs", [0, 1, 6])
def test_pool_pairs(pairs: int) -> None:
    values, scores = randn(1, 2 * pairs, 16), randn(1, 2 * pairs, 16, seed=1)
    made = compressor.pool_pairs(values[0].view(-1, 2, 16), scores[0].view(-1, 2, 16))
    close(made, reference_compressor.pool_pairs(values, scores)[0])


class TestEngram:
    config = ModelConfig.from_dict(golden(), "test")

    def test_constants(self) -> None:
        wanted = reference_engram.EngramHashing.from_config(self.config)
        for index, made in enumerate(engram.EngramHashing.from_config(self.config)):
            for name in ("primes", "offsets", "multipliers"):
                assert getattr(made, name).tolist() == getattr(wanted, name)[index].tolist()

    @pytest.mark.parametrize("size", [2, 3, 4])
    @pytest.mark.parametrize("count", [1, 2, 30])
    def test_lookback(self, size: int, count: int) -> None:
        """The reference reads whole sequences; here what came before a stretch is given, -1 where nothing did."""
        generator = torch.Generator().manual_seed(size)
        classes = torch.randint(0, 50, (3, count), generator=generator)
        is_text = torch.rand(3, count, generator=generator) < 0.8
        wanted = torch.stack(reference_engram.lookback(classes, is_text, size, 7), dim=-1)
        stopped = classes.masked_fill(~is_text, -1)
        for first in {0, 1, count // 2}:
            if first < count:
                earlier = torch.nn.functional.pad(stopped, (size - 1, 0), value=-1)
                made = engram.lookback(earlier[:, first:], size, 7)
                assert torch.equal(made, wanted[:, first:])

    def test_row_ids(self) -> None:
        generator = torch.Generator().manual_seed(0)
        back = torch.randint(0, self.config.engram_compressed_vocab_size, (9, 4), generator=generator)
        for hashing in engram.EngramHashing.from_config(self.config):
            constants = (hashing.primes, hashing.offsets, hashing.multipliers)
            wanted = reference_engram.row_ids(list(back.unbind(-1)), *constants, self.config.engram_n_heads)
            assert torch.equal(engram.row_ids(back, hashing, self.config.engram_n_heads), wanted)

    @each_count
    @each_dtype
    def test_remember(self, count: int, dtype: torch.dtype) -> None:
        config = self.config
        layer = reference_engram.Engram(config, config.engram_layer_ids[0])
        for name in ("q_weight", "k_weight"):
            getattr(layer, name).data = randn(config.hc_mult, config.hidden_size, seed=len(name))
        x = randn(count, config.hc_mult, config.hidden_size, seed=1, dtype=dtype)
        kv = randn(count, (config.hc_mult + 1) * config.hidden_size, seed=2, dtype=dtype)
        is_text = torch.arange(count) % 3 != 1
        keys, value = kv[:, : -config.hidden_size].view_as(x), kv[:, -config.hidden_size :]
        gate = layer.gate(x, keys) * is_text[:, None]
        wanted = (x.float() + gate[..., None] * value.float()[:, None]).to(dtype)
        made = engram.remember(x, kv, (layer.q_weight * layer.k_weight).data, is_text, config.rms_norm_eps)
        close(made, wanted.detach(), ulps=4)
        assert torch.equal(made[~is_text], x[~is_text])
