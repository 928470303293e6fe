"""Products with quantised weights: what folding keeps, what rounding of activations costs, and rows by themselves."""

import pytest
import torch
from torch import Tensor

from deepinfer.checkpoint.formats import (
    dequantize_fp4_rows,
    dequantize_fp8_blocks,
    quantize_fp4_rows,
    quantize_fp8_blocks,
)
from deepinfer.ops.experts import Fp4Experts, fits, routed_experts, tile_experts
from deepinfer.ops.linear import (
    Fp8Weight,
    fold_blocks,
    fold_rows,
    grouped_linear,
    join,
    linear,
    quantize_rows,
    wide_linear,
)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def error(made: Tensor, wanted: Tensor) -> float:
    return ((made.double() - wanted.double()).norm() / wanted.double().norm()).item()


class TestFp8:
    @pytest.mark.parametrize("shape", [(32, 32), (70, 100), (1, 5), (256, 96)], ids=str)
    @pytest.mark.parametrize("spread", [0.0, 0.5], ids=["even", "uneven rows"])
    def test_folding_keeps_the_weights(self, shape: tuple[int, int], spread: float) -> None:
        codes, scales = quantize_fp8_blocks(0.02 * randn(*shape) * torch.exp(spread * randn(shape[0], 1, seed=1)))
        folded = fold_blocks(codes, scales)
        assert error(folded.dequantized(), dequantize_fp8_blocks(codes, scales)) < 1e-4

    def test_a_row_scale_is_that_of_its_band(self) -> None:
        weight = torch.ones(64, 64)
        weight[32:, 32:] = 1000.0
        folded = fold_blocks(*quantize_fp8_blocks(weight))
        assert folded.scales.unique_consecutive().tolist() == [2.0**-8, 2.0**2]
        assert torch.equal(folded.dequantized()[:32], torch.ones(32, 64))

    @pytest.mark.parametrize("rows", [0, 1, 7])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
    def test_linear(self, rows: int, dtype: torch.dtype) -> None:
        weight = fold_blocks(*quantize_fp8_blocks(randn(96, 64, seed=2)))
        x = randn(rows, 64).to(dtype)
        codes, scales = quantize_rows(x)
        made = linear(x, weight)
        assert made.dtype is dtype
        wanted = (codes.double() * scales[:, None]) @ weight.dequantized().double().T
        torch.testing.assert_close(made.double(), wanted, rtol=2**-8 if dtype is torch.bfloat16 else 1e-5, atol=1e-4)
        if rows:
            assert error(made, x.double() @ weight.dequantized().double().T) < 5e-2

    def test_groups_have_matrices_of_their_own(self) -> None:
        parts = [fold_blocks(*quantize_fp8_blocks(randn(32, 64, seed=seed))) for seed in range(3)]
        codes = torch.stack([part.codes.view(torch.uint8) for part in parts]).view(torch.float8_e4m3fn)
        x = randn(5, 3, 64)
        made = grouped_linear(x, Fp8Weight(codes, torch.stack([part.scales for part in parts])))
        for group, part in enumerate(parts):
            assert torch.equal(made[:, group], linear(x[:, group], part))

    def test_joined_matrices(self) -> None:
        parts = [fold_blocks(*quantize_fp8_blocks(randn(rows, 64, seed=rows))) for rows in (32, 40)]
        x = randn(3, 64)
        torch.testing.assert_close(linear(x, join(parts)), torch.cat([linear(x, part) for part in parts], 1))

    def test_activations_of_any_size(self) -> None:
        x = torch.tensor([[0.0, 0.0], [1e-30, -1e-30], [448.0, 1.0], [449.0, 2.0], [3e38, -3e38]])
        codes, scales = quantize_rows(x)
        assert torch.isfinite(codes.float()).all()
        assert torch.equal(codes[0].float() * scales[0], x[0])
        torch.testing.assert_close(codes[2:].float() * scales[2:, None], x[2:], rtol=2**-4, atol=0)
        assert scales[2:4].tolist() == [1.0, 2.0]

    def test_wide_products_of_bfloat16_are_exact(self) -> None:
        x, weight = randn(4, 64).bfloat16(), randn(8, 64, seed=1).bfloat16()
        torch.testing.assert_close(
            wide_linear(x, weight).double(), x.double() @ weight.double().T, rtol=1e-5, atol=1e-5
        )


class TestFp4:
    @pytest.mark.parametrize("paired", [False, True])
    def test_tiles_hold_the_stored_weights(self, paired: bool) -> None:
        codes, scales = quantize_fp4_rows(randn(2, 512, 256) * torch.exp(0.5 * randn(2, 512, 1, seed=1)))
        experts, rounded = tile_experts(codes, scales, paired)
        assert experts.shape == (2, 512, 256)
        assert experts.tiles.nbytes == 2 * 512 * 256 * 17 // 32
        assert rounded == 0
        for expert, wanted in enumerate(dequantize_fp4_rows(codes, scales)):
            assert torch.equal(experts.dequantized(expert), wanted)

    def test_blocks_too_far_below_their_row_are_counted(self) -> None:
        weight = torch.ones(1, 256, 256)
        weight[0, 3, :32] = 2.0**-12
        weight[0, 5, :32] = 0  # zeros fit any scale
        experts, rounded = tile_experts(*quantize_fp4_rows(weight), paired=False)
        assert rounded == 1
        kept = experts.dequantized(0)
        assert kept[3, :32].max() <= 2.0**-10
        kept[3, :32] = weight[0, 3, :32]
        assert torch.equal(kept, weight[0])

    def test_what_cannot_be_tiled(self) -> None:
        assert fits(256, 512)
        assert not fits(128, 256)
        assert not fits(256, 160)

    def test_rows_as_fp8(self) -> None:
        codes, scales = quantize_fp4_rows(randn(3, 40, 64))
        folded = fold_rows(codes, scales.view(torch.uint8))
        assert torch.equal(folded.dequantized(), dequantize_fp4_rows(codes, scales))


class TestExperts:
    hidden, width, experts, limit = 256, 256, 4, 10.0

    def weights(self, tiled: bool) -> tuple[Fp8Weight | Fp4Experts, Fp8Weight | Fp4Experts]:
        first = quantize_fp4_rows(randn(self.experts, 2 * self.width, self.hidden, seed=1) / 16)
        second = quantize_fp4_rows(randn(self.experts, self.hidden, self.width, seed=2) / 16)
        if tiled:
            return tile_experts(*first, paired=True)[0], tile_experts(*second, paired=False)[0]
        return fold_rows(first[0], first[1].view(torch.uint8)), fold_rows(second[0], second[1].view(torch.uint8))

    def test_both_forms_give_the_same(self) -> None:
        x, chosen, routing = randn(9, self.hidden), torch.randint(0, 4, (9, 2)), torch.rand(9, 2)
        made = routed_experts(x, chosen, routing, *self.weights(True), self.limit)
        torch.testing.assert_close(made, routed_experts(x, chosen, routing, *self.weights(False), self.limit))

    def test_close_to_the_dequantised_ones(self) -> None:
        x, chosen, routing = randn(9, self.hidden), torch.randint(0, 4, (9, 2)), torch.rand(9, 2)
        w13, w2 = self.weights(True)
        dense = [torch.stack([part.dequantized(e) for e in range(self.experts)]) for part in (w13, w2)]
        made = routed_experts(x, chosen, routing, w13, w2, self.limit)
        assert error(made, routed_experts(x, chosen, routing, dense[0], dense[1], self.limit)) < 8e-2

    def test_a_row_does_not_depend_on_its_neighbours(self) -> None:
        x, chosen, routing = randn(9, self.hidden), torch.randint(0, 4, (9, 2)), torch.rand(9, 2)
        together = routed_experts(x, chosen, routing, *self.weights(True), self.limit)
        alone = routed_experts(x[3:4], chosen[3:4], routing[3:4], *self.weights(True), self.limit)
        torch.testing.assert_close(together[3:4], alone)
