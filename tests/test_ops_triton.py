"""Triton's kernels against the PyTorch operators, through Triton's interpreter where there is no GPU."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from deepinfer.checkpoint.formats import index_mxfp4, quantize_fp8_blocks, quantize_fp8_rows
from deepinfer.core.batch import Pairs
from deepinfer.ops import hyper_connections as hyper
from deepinfer.ops.compressor import torch as compressor_reference
from deepinfer.ops.compressor import triton as compressor_kernels
from deepinfer.ops.engram import EngramHashing
from deepinfer.ops.engram import torch as engram_reference
from deepinfer.ops.engram import triton as engram_kernels
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
from deepinfer.ops.places import torch as place_reference
from deepinfer.ops.places import triton as place_kernels
from deepinfer.ops.rope import frequencies, rotations
from deepinfer.ops.rope import torch as rope_reference
from deepinfer.ops.rope import triton as rope_kernels
from deepinfer.ops.router import torch as router_reference
from deepinfer.ops.router import triton as router_kernels
from deepinfer.ops.sparse_attention import triton as attention_kernels
from deepinfer.ops.triton import INTERPRETED

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
    made = norm_kernels.rounded_rms_norm(x, weight, 1e-20)
    wanted = linear_kernels.quantize_rows(norm_kernels.rms_norm(x, weight, 1e-20))
    assert torch.equal(made.codes.view(torch.uint8), wanted.codes.view(torch.uint8))
    assert torch.equal(made.scales, wanted.scales)


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


@each_count
def test_remember(count: int) -> None:
    x, kv, qk = randn(count, 4, 80).bfloat16(), randn(count, 400, seed=1).bfloat16(), randn(4, 80, seed=2)
    is_text = torch.arange(count, device=DEVICE) % 3 != 1
    made = engram_kernels.remember(x, kv, qk, is_text, 1e-20)
    near(made, engram_reference.remember(x, kv, qk, is_text, 1e-20))
    assert torch.equal(made[~is_text], x[~is_text])


@each_count
def test_engram_rows(count: int) -> None:
    """Ids of n-grams, and what a table holds in their rows."""
    numbers = torch.Generator().manual_seed(count)
    back = torch.randint(0, 99_000, (count, 4), generator=numbers).to(DEVICE)
    parts = torch.randint(40, 60, (24,), generator=numbers), torch.arange(24) * 60, torch.randint(1 << 40, (4,)) * 2 + 1
    hashing = EngramHashing(*parts).to(DEVICE)
    ids = engram_kernels.row_ids(back, hashing, 8)
    assert torch.equal(ids, engram_reference.row_ids(back, hashing, 8))
    codes, scales = quantize_fp8_rows(randn(24 * 60, 96, seed=1).cpu())
    table = codes.view(torch.uint8).to(DEVICE), scales.view(torch.uint8).to(DEVICE)
    wanted = engram_reference.table_rows(*table, ids.flatten(), torch.bfloat16)
    assert torch.equal(engram_kernels.table_rows(*table, ids.flatten()), wanted)


@each_count
def test_recall(count: int) -> None:
    """Requests that begin, that show an image, and rows that repeat the first."""
    slots = torch.tensor([2, 0, 1, *[2] * 15], device=DEVICE)[:count]
    positions = torch.tensor([9, 1, 4, *[9] * 15], device=DEVICE)[:count]
    ids = torch.tensor([5, 6, 3, *[5] * 15], device=DEVICE)[:count]
    classes = torch.tensor([4, 8, 1, 0, -1, 2, 7], device=DEVICE)
    history = torch.tensor([[0, 1, 2], [3, 4, 1], [6, 5, 2]], device=DEVICE)
    kept = history.clone()
    made = engram_kernels.recall(ids, slots, positions, history, classes, 4, 99)
    wanted = engram_reference.recall(ids, slots, positions, kept, classes, 4, 99)
    assert torch.equal(made[0], wanted[0])
    assert torch.equal(made[1], wanted[1])
    assert torch.equal(history, kept)


class TestPlaces:
    @each_count
    def test_single_rows(self, count: int) -> None:
        """Positions before a window is full, at the seams of a ring, and far away."""
        positions = torch.tensor([0, 7, 8, 9, 100_000, 31, 12] * 3, device=DEVICE)[:count]
        slots, lowest = torch.arange(count, device=DEVICE) % 4, (positions - 3).clamp(min=0) // 2
        plain, compressed = (frequencies(12, theta).to(DEVICE) for theta in (100.0, 10000.0))
        arguments = (positions, slots, lowest, 6, 9, plain, compressed)
        made, wanted = place_kernels.single_rows(*arguments), place_reference.single_rows(*arguments)
        for one, other in zip(made[:-2], wanted[:-2], strict=True):
            assert one.dtype is other.dtype
            assert torch.equal(one, other)
        for one, other in zip(made[-2:], wanted[-2:], strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=2e-6)

    @each_count
    @pytest.mark.parametrize("ratio", [1, 2])
    def test_entry_rows(self, count: int, ratio: int) -> None:
        positions = torch.arange(20, device=DEVICE) * 3 + 1
        slots, table = torch.arange(20, device=DEVICE) % 3, torch.randperm(60, device=DEVICE).view(3, 20)
        rows = torch.randperm(20, device=DEVICE)[:count]
        arguments = (rows, positions, slots, table, 4, ratio, frequencies(12, 100.0).to(DEVICE))
        made, wanted = place_kernels.entry_rows(*arguments), place_reference.entry_rows(*arguments)
        assert torch.equal(made[0], wanted[0])
        torch.testing.assert_close(made[1], wanted[1], rtol=0, atol=2e-6)


class TestCompressor:
    @staticmethod
    def places(count: int) -> Tensor:
        return torch.randperm(2 * count + 1, generator=torch.Generator().manual_seed(count))[:count].to(DEVICE)

    @each_count
    @pytest.mark.parametrize("placed", [False, True])
    def test_latents(self, count: int, placed: bool) -> None:
        x = randn(count, 80) * torch.exp(3 * randn(count, 5, 1, seed=3)).expand(-1, -1, 16).flatten(1)
        x[1:2, 16:32] = 0
        norm, turns = randn(80, seed=1), turns_of(count, 8)
        places = self.places(count) if placed else None
        made, wanted = (torch.full((2 * count + 1 if placed else count, 45), 7, dtype=torch.uint8) for _ in range(2))
        made, wanted = made.to(DEVICE), wanted.to(DEVICE)
        latents = compressor_kernels.latent_rows(x, norm, turns, 1e-20, made, places)
        reference = compressor_reference.latent_rows(x, norm, turns, 1e-20, torch.bfloat16, wanted, places)
        near(latents, reference)
        assert torch.equal(made, wanted) if INTERPRETED else (made != wanted).float().sum() <= 0.01 * made.numel()

    @each_count
    @pytest.mark.parametrize("placed", [False, True])
    def test_keys(self, count: int, placed: bool) -> None:
        x, norm, turns = rows_of(count, 96).contiguous(), randn(96, seed=1), turns_of(count, 16)
        x[1:2, :32] = -0.0
        places = self.places(count) if placed else None
        made, wanted = (torch.full((2 * count + 1 if placed else count, 51), 7, dtype=torch.uint8) for _ in range(2))
        made, wanted = made.to(DEVICE), wanted.to(DEVICE)
        compressor_kernels.key_rows(x, norm, turns, 1e-20, made, places)
        compressor_reference.key_rows(x, norm, turns, 1e-20, wanted, places)
        assert torch.equal(made, wanted) if INTERPRETED else (made != wanted).float().sum() <= 0.01 * made.numel()

    def test_a_nan_stays_in_its_block(self) -> None:
        x, norm, turns = torch.ones(1, 96, device=DEVICE).bfloat16(), torch.ones(96, device=DEVICE), turns_of(1, 16)
        norm[40] = torch.nan
        made = torch.zeros(1, 51, dtype=torch.uint8, device=DEVICE)
        compressor_kernels.key_rows(x, norm, turns, 1e-20, made, None)
        values = unpack_index(made, torch.float32)[0].isnan()
        assert values.view(3, 32).all(1).tolist() == [False, True, False]

    def test_pairs(self) -> None:
        """Partners in the step and from earlier steps, kept rows behind them."""
        made, pending = randn(5, 2, 40), randn(3, 4, 2, 40, seed=1)
        integers = ([1, 4, 0], [0, 3, 6], [2, 1], [14, -1], [2, 3])
        pairs = Pairs(*(torch.tensor(part, device=DEVICE) for part in integers))
        pooled = compressor_kernels.pool_rows(made, pending, pairs)
        wanted = compressor_reference.pool_pairs(*compressor_reference.partners(made, pending, pairs))
        torch.testing.assert_close(pooled, wanted)
        slots, positions = torch.tensor([0, 0, 1, 2, 2], device=DEVICE), torch.arange(5, device=DEVICE) + 6
        expected = pending.clone()
        compressor_reference.keep_rows(made, expected, pairs.kept, slots, positions)
        compressor_kernels.keep_rows(made, pending, pairs.kept, slots, positions)
        assert torch.equal(pending, expected)


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

    def test_addresses(self) -> None:
        chosen = torch.tensor([[0, 8, 36, -1], [-1, -1, 1, 8]], dtype=torch.int32, device=DEVICE)
        slots = torch.tensor([0, 1], dtype=torch.int32, device=DEVICE)
        _, pages, _ = self.cache()
        assert index_kernels.entry_rows(chosen, slots, pages, 8).tolist() == [[24, 0, 12, -1], [-1, -1, 49, 16]]
