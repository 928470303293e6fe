"""Triton's kernels against the PyTorch operators, through Triton's interpreter where there is no GPU."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from deepinfer.checkpoint.formats import index_mxfp4, quantize_fp8_blocks
from deepinfer.ops import hyper_connections as hyper
from deepinfer.ops.experts import triton as expert_kernels
from deepinfer.ops.experts.torch import swiglu
from deepinfer.ops.hyper_connections import torch as hyper_reference
from deepinfer.ops.hyper_connections import triton as hyper_kernels
from deepinfer.ops.indexer import triton as index_kernels
from deepinfer.ops.kv_formats import pack_index, pack_window, unpack_index
from deepinfer.ops.kv_formats import triton as format_kernels
from deepinfer.ops.linear import Fp8Weight, fold_blocks
from deepinfer.ops.linear import torch as linear_reference
from deepinfer.ops.linear import triton as linear_kernels
from deepinfer.ops.norm import torch as norm_reference
from deepinfer.ops.norm import triton as norm_kernels
from deepinfer.ops.rope import frequencies, rotations
from deepinfer.ops.rope import torch as rope_reference
from deepinfer.ops.rope import triton as rope_kernels
from deepinfer.ops.router import torch as router_reference
from deepinfer.ops.router import triton as router_kernels
from deepinfer.ops.sparse_attention import triton as attention_kernels

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
each_count = pytest.mark.parametrize("count", [0, 1, 3, 18])


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def rows_of(count: int, columns: int, seed: int = 0) -> Tensor:
    """BF16 rows of very different sizes, that lie apart."""
    sizes = torch.exp(2 * randn(count, 1, seed=seed + 100))
    return (randn(count, columns + 8, seed=seed) * sizes).bfloat16()[:, :columns]


def near(made: Tensor, wanted: Tensor, ulps: float = 1) -> None:
    """Equal but for the order of sums."""
    assert made.dtype is wanted.dtype
    assert made.shape == wanted.shape
    if wanted.numel():
        step = 2.0**-8 if wanted.dtype is torch.bfloat16 else 2.0**-18
        scale = wanted.float().abs().amax(-1, keepdim=True).clamp(min=1e-30)
        assert ((made.float() - wanted.float()).abs() / scale).max().item() <= ulps * step


def same_codes(made: Tensor, wanted: Tensor, least: float) -> None:
    """E4M3 codes, of which a share may differ by one step: a sum in another order moves a value over a tie."""
    assert made.shape == wanted.shape
    if wanted.numel():
        made, wanted = made.float(), wanted.float()
        assert (made == wanted).float().mean() >= least
        assert bool(((made - wanted).abs() <= 0.126 * wanted.abs() + 2.0**-8).all())


def turns_of(count: int, pairs: int) -> Tensor:
    positions = torch.arange(count, device=DEVICE) * 1237
    return rotations(positions, frequencies(2 * pairs, 10000.0).to(DEVICE))


@each_count
def test_rms_norm(count: int) -> None:
    x, weight = rows_of(count, 80), randn(80, seed=1)
    near(norm_kernels.rms_norm(x, weight, 1e-20), norm_reference.rms_norm(x, weight, 1e-20))


@each_count
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["fp16", "fp32"])
def test_rotate(count: int, dtype: torch.dtype) -> None:
    x, turns = randn(count, 16, 48).bfloat16(), turns_of(count, 8)
    wanted = rope_reference.rotate(x.float(), turns[:, None]).to(dtype)
    torch.testing.assert_close(rope_kernels.rotate(x, turns, dtype), wanted, rtol=1e-3, atol=1e-3)


class TestLinear:
    @each_count
    @pytest.mark.parametrize("columns", [32, 100])
    def test_rounding(self, count: int, columns: int) -> None:
        x = rows_of(count, columns)
        made, wanted = linear_kernels.quantize_rows(x), linear_reference.quantize_rows(x)
        assert torch.equal(made.scales, wanted.scales)
        same_codes(made.codes, wanted.codes, 1.0)

    @pytest.mark.parametrize("count", [1, 16, 33])
    @pytest.mark.parametrize("shape", [(64, 256), (96, 1280), (128, 96)], ids=str)
    def test_few_rows(self, count: int, shape: tuple[int, int]) -> None:
        weight = fold_blocks(*(part.to(DEVICE) for part in quantize_fp8_blocks(randn(*shape, seed=1).cpu())))
        rows = linear_reference.quantize_rows(rows_of(count, shape[1]))
        near(linear_kernels.linear(rows, weight), linear_reference.fp8_linear(rows, weight, torch.bfloat16))

    def test_rounding_of_groups(self) -> None:
        x = randn(3, 5, 64).bfloat16().transpose(0, 1)
        made, wanted = linear_kernels.quantize_groups(x), linear_reference.quantize_rows(x.flatten(1))
        assert torch.equal(made.scales, wanted.scales)
        same_codes(made.codes, wanted.codes, 1.0)

    @pytest.mark.parametrize("count", [1, 17])
    def test_groups(self, count: int) -> None:
        parts = [fold_blocks(*quantize_fp8_blocks(randn(64, 128, seed=seed).cpu())) for seed in range(3)]
        codes = torch.stack([part.codes.view(torch.uint8) for part in parts]).view(torch.float8_e4m3fn).to(DEVICE)
        weight = Fp8Weight(codes, torch.stack([part.scales for part in parts]).to(DEVICE))
        rows = linear_reference.quantize_rows(randn(count, 3, 128).bfloat16())
        wanted = linear_reference.fp8_grouped_linear(rows, weight, torch.bfloat16)
        near(linear_kernels.grouped_linear(rows, weight), wanted)


@each_count
def test_activation_of_the_shared_expert(count: int) -> None:
    x = 4 * randn(count, 2 * 80).bfloat16()
    made, wanted = expert_kernels.activate(x, 10.0), linear_reference.quantize_rows(swiglu(x, 10.0).bfloat16())
    assert torch.equal(made.scales, wanted.scales)
    same_codes(made.codes, wanted.codes, 0.98)  # the exponential rounds otherwise


@each_count
@pytest.mark.parametrize("biased", [False, True])
def test_router(count: int, biased: bool) -> None:
    logits = 4 * randn(count, 48)
    bias = randn(count, 48, seed=1) if biased else randn(48, seed=1)
    eye = torch.eye(48, device=DEVICE)
    parts = torch.stack((0.25 * logits, 0.5 * logits, 0.25 * logits))  # exact in FP32
    chosen, weights = router_kernels.choose(parts, bias, 6, 1.5)
    wanted, wanted_weights = router_reference.route(logits, eye, bias, 6, 1.5)
    assert torch.equal(chosen, wanted)
    torch.testing.assert_close(weights, wanted_weights)


@each_count
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_logits_of_the_router(count: int, dtype: torch.dtype) -> None:
    h, weight = randn(count, 600).bfloat16(), randn(40, 600, seed=1).to(dtype)
    made = router_kernels.logits(h, weight)
    assert made.dtype is torch.float32
    assert len(made) > 1 or dtype is torch.float32 or not count
    torch.testing.assert_close(made.sum(0), h.float() @ weight.float().T, rtol=1e-5, atol=1e-4)


class TestHyperConnections:
    def site(self, count: int) -> tuple[Tensor, hyper.Mix, tuple[Tensor, Tensor, Tensor]]:
        x = randn(count, 4, 64).bfloat16()
        fn, base, scale = 0.1 * randn(24, 256, seed=1), randn(24, seed=2), randn(24, seed=3)
        return x, hyper_reference.coefficients(x, fn, base, scale, 1e-20, 1e-6, 20), (fn, base, scale)

    @each_count
    def test_coefficients(self, count: int) -> None:
        x, wanted, weights = self.site(count)
        made = hyper_kernels.coefficients(x, *weights, 1e-20, 1e-6, 20)
        for part, reference in zip(made, wanted, strict=True):
            torch.testing.assert_close(part, reference, rtol=2e-5, atol=2e-6)

    @each_count
    def test_advance(self, count: int) -> None:
        x, mix, _ = self.site(count)
        y, norm = randn(count, 64, seed=5).bfloat16(), randn(64, seed=6)
        streams, made = hyper_kernels.advance(y, x, mix, norm, 1e-20)
        wanted = hyper_reference.expand(y, x, mix)
        near(streams, wanted)
        collapsed = hyper_reference.collapse(streams, mix.pre)
        near(made, norm_reference.rms_norm(collapsed, norm, 1e-20), ulps=2)


@each_count
def test_window_rows(count: int) -> None:
    x, norm, turns = rows_of(count, 192), randn(192, seed=1), turns_of(count, 16)
    places = torch.arange(count, device=DEVICE) * 2 - 1  # the first is not kept
    packed = torch.zeros(count, 198, dtype=torch.uint8, device=DEVICE)
    ring = torch.full((2 * count + 1, 198), 7, dtype=torch.uint8, device=DEVICE)
    format_kernels.window_rows(x, norm, turns, 1e-20, places, packed, ring)
    rotated = rope_reference.rotate(norm_reference.rms_norm(x, norm, 1e-20), turns)
    wanted = pack_window(rotated)
    same_codes(*(part[:, :192].view(torch.float8_e4m3fn) for part in (packed, wanted)), 0.99)
    assert torch.equal(packed[:, 192:], wanted[:, 192:])
    kept = torch.full_like(ring, 7)
    kept[places[1:]] = packed[1:]
    assert torch.equal(ring, kept)


@each_count
def test_output_rows(count: int) -> None:
    o, turns = randn(count, 6, 96).bfloat16(), turns_of(count, 16)
    made = attention_kernels.output_rows(o, turns, 3) if count else None
    if made is not None:
        back = rope_reference.rotate(o, turns[:, None].conj()).view(count, 3, 192)
        wanted = linear_reference.quantize_rows(back)
        torch.testing.assert_close(made.scales, wanted.scales)
        same_codes(made.codes, wanted.codes, 0.99)


class TestIndexer:
    """Two requests of different length, on pages in no order."""

    page_size, ratio = 16, 2
    lengths = (37, 9)  # entries

    def cache(self) -> tuple[Tensor, Tensor, list[Tensor]]:
        entries, pages = self.page_size // self.ratio, torch.tensor([[3, 0, 7, 5, 1], [6, 2, 0, 0, 0]])
        keys = [
            randn(length, 128, seed=length).bfloat16() * torch.exp(randn(length, 1, seed=1)) for length in self.lengths
        ]
        stored = torch.full((8 * entries, 68), 119, dtype=torch.uint8, device=DEVICE)
        for row, own in zip(pages, keys, strict=True):
            places = [int(row[j // entries]) * entries + j % entries for j in range(len(own))]
            stored[places] = pack_index(own)
        return stored, pages.to(DEVICE), [unpack_index(pack_index(own), torch.float32) for own in keys]

    def query(self, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        return randn(rows, 32, 128, seed=5).bfloat16(), turns_of(rows, 32), randn(rows, 32, seed=6).bfloat16()

    @pytest.mark.parametrize("count", [0, 1, 3])
    def test_queries(self, count: int) -> None:
        """The codes times their scale, in the order of the channels, are the rotated and rounded queries."""
        q, turns, weights = self.query(count)
        q = q * torch.exp(0.5 * randn(count, 32, 4, 1, seed=7)).expand(-1, -1, -1, 32).flatten(2).bfloat16()
        codes, scaled = index_kernels.queries(q, turns, weights, 0.25)
        order = torch.arange(128).view(4, 2, 4, 4).permute(2, 0, 1, 3).flatten()  # place by channel
        made = codes.float()[..., order.to(DEVICE)] * (scaled / (weights.float() * 0.25))[..., None]
        wanted = index_mxfp4(rope_reference.rotate(q, turns[:, None])).float()
        torch.testing.assert_close(made, wanted, rtol=1e-5, atol=0.0)

    def test_queries_whose_blocks_are_far_apart(self) -> None:
        """What lies more than 2^9 under a head's largest scale is lost as rounding, never scaled up."""
        q, turns, weights = self.query(1)
        q[..., :32] *= 2.0**-14
        codes, _ = index_kernels.queries(q, turns, weights, 1.0)
        small = codes.float().view(32, 4, 2, 4, 4)[:, :, :, 0]
        assert (small.abs() <= 2.0**-9).all()
        assert codes.float().abs().amax() == 3.0

    def test_candidates(self) -> None:
        _, pages, _ = self.cache()
        one = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        blocks = torch.tensor([[-1, 0, 2, 7]], dtype=torch.int32, device=DEVICE)
        chosen = torch.tensor([[4, 13, -1, 0]], dtype=torch.int32, device=DEVICE)
        found = index_kernels.entry_rows(chosen, one, pages, 8, blocks, 4)
        assert found.tolist() == [[3 * 8, 5 * 8 + 29 % 8, -1, -1]]

    def test_addresses(self) -> None:
        chosen = torch.tensor([[0, 8, 36, -1], [-1, -1, 1, 8]], dtype=torch.int32, device=DEVICE)
        slots = torch.tensor([0, 1], dtype=torch.int32, device=DEVICE)
        _, pages, _ = self.cache()
        assert index_kernels.entry_rows(chosen, slots, pages, 8).tolist() == [[24, 0, 12, -1], [-1, -1, 49, 16]]
