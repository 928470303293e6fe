"""CUDA C++ kernels against the PyTorch operators, on a GPU of the Hopper generation. Run with scripts/gpu_tests.sh."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from deepinfer.checkpoint.formats import index_mxfp4
from deepinfer.ops.experts import Fp4Experts, tile_experts
from deepinfer.ops.experts import torch as expert_reference
from deepinfer.ops.indexer import torch as index_reference
from deepinfer.ops.kv_formats import pack_index, unpack_index
from deepinfer.ops.linear import Fp8Weight, grouped_linear, linear, quantize_rows, wide_linear
from deepinfer.ops.linear import torch as linear_reference
from deepinfer.ops.rope import frequencies, rotations
from deepinfer.ops.rope import torch as rope_reference
from deepinfer.ops.rows import Index

pytestmark = pytest.mark.gpu


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def relative(made: Tensor, wanted: Tensor) -> float:
    assert made.isfinite().all()
    return ((made.double() - wanted.double()).norm() / wanted.double().norm()).item()


class TestLinear:
    """FP8 products; every way to split them, and numbers of rows that the library refuses."""

    @pytest.mark.parametrize("rows", [0, 1, 16, 17, 33, 64, 65, 100, 128, 129, 257, 601, 4346])
    @pytest.mark.parametrize(("columns", "features"), [(5120, 1792), (1280, 32768), (2304, 5120)])
    def test_against_pytorch(self, rows: int, columns: int, features: int) -> None:
        x, weight = randn(rows, columns), self.weight(features, columns)
        made = linear(x, weight)
        assert made.shape == (rows, features)
        if rows:
            assert relative(made, linear_reference.fp8_linear(quantize_rows(x), weight, torch.bfloat16)) < 4e-3
            assert torch.equal(linear(x, weight), made)

    @pytest.mark.parametrize("rows", [0, 1, 20, 64, 128, 130, 256, 601, 4346])
    def test_groups(self, rows: int) -> None:
        x, weight = randn(rows, 8, 4096), self.weight(8, 1024, 4096)
        made = grouped_linear(x, weight)
        assert made.shape == (rows, 8, 1024)
        if rows:
            wanted = linear_reference.fp8_grouped_linear(quantize_rows(x), weight, torch.bfloat16)
            assert relative(made, wanted) < 4e-3
            assert torch.equal(grouped_linear(x, weight), made)

    def test_wide_products_of_no_rows(self) -> None:
        assert wide_linear(randn(0, 64), randn(32, 64)).shape == (0, 32)

    @staticmethod
    def weight(*shape: int) -> Fp8Weight:
        codes = (randn(*shape, dtype=torch.float32) * 96).clamp(-448, 448).to(torch.float8_e4m3fn)
        return Fp8Weight(codes, torch.rand(shape[:-1], device="cuda") + 0.5)


class TestExperts:
    """Eight experts of 512 -> 2 x 256 -> 512."""

    @staticmethod
    def weights() -> tuple[Fp4Experts, Fp4Experts]:
        made = []
        for rows, columns, paired in ((512, 512, True), (512, 256, False)):
            codes = torch.randint(0, 256, (8, rows, columns // 2), device="cuda", dtype=torch.int32)
            scales = 120 - torch.randint(0, 3, (8, rows, columns // 32), device="cuda", dtype=torch.int32)
            made.append(tile_experts(codes.to(torch.uint8), scales.to(torch.uint8), paired)[0])
        return made[0], made[1]

    @pytest.mark.parametrize("rows", [1, 2, 7, 40, 90, 150, 700, 1100, 5000])
    @pytest.mark.parametrize("spread", ["even", "one", "few"])
    def test_against_pytorch(self, rows: int, spread: str) -> None:
        """Loads of all kinds; twenty times the same bits."""
        from deepinfer.ops.experts import cuda

        torch.manual_seed(rows)
        w13, w2 = self.weights()
        odds = {"even": [1.0] * 8, "one": [1e-4, 1e-4, 1, 1e-4, 1, 1e-4, 1e-4, 1e-4], "few": [0, 0, 1, 0, 1, 0, 0, 5]}
        chosen = torch.multinomial(torch.tensor(odds[spread], dtype=torch.float32, device="cuda").expand(rows, 8), 3)
        x, base, routing = randn(rows, 512), randn(rows, 512), torch.rand(rows, 3, device="cuda")
        made = cuda.routed_experts(x, chosen, routing, w13, w2, 10.0, lambda: base)
        wanted = expert_reference.routed_experts(x, chosen, routing, w13, w2, 10.0) + base
        assert relative(made, wanted) < 2e-2
        for _ in range(20):
            assert torch.equal(cuda.routed_experts(x, chosen, routing, w13, w2, 10.0, lambda: base), made)


class TestIndexScores:
    """Requests of different lengths on pages in no order, whose unused entries hold anything."""

    lengths = (1000, 63, 64, 65, 2, 517)

    def index(self, page_size: int, ratio: int) -> tuple[Index, list[Tensor]]:
        """Every request has three rows, that see its last entry, the one before it and so on."""
        entries = page_size // ratio
        columns = -(-max(self.lengths) // entries)
        table = torch.randperm(len(self.lengths) * columns, device="cuda").view(len(self.lengths), columns)
        cache = torch.randint(0, 256, (table.numel() * entries, 68), device="cuda").to(torch.uint8)
        keys = []
        for row, length in zip(table, self.lengths, strict=True):
            stored = pack_index(randn(length, 128) * torch.exp(randn(length, 1)))
            at = torch.arange(length, device="cuda")
            cache[row[at // entries] * entries + at % entries] = stored
            keys.append(unpack_index(stored, torch.float32))
        slots = torch.arange(len(self.lengths), device="cuda", dtype=torch.int32)
        visible = torch.tensor([max(0, n - back) for n in self.lengths for back in range(3)], device="cuda")
        index = Index(
            keys=cache,
            page_table=table,
            page_size=page_size,
            ratio=ratio,
            slots=slots.repeat_interleave(3),
            visible=visible.int(),
            length=1024,
            group_slots=slots,
            group_firsts=3 * slots,
            group_counts=torch.full_like(slots, 3),
        )
        return index, keys

    @staticmethod
    def single(index: Index) -> Index:
        rows = torch.arange(len(index.slots), device="cuda", dtype=torch.int32)
        return replace(index, group_slots=index.slots, group_firsts=rows, group_counts=torch.ones_like(rows))

    @staticmethod
    def query(rows: int) -> tuple[Tensor, Tensor, Tensor]:
        turns = rotations(torch.arange(rows, device="cuda") * 1237, frequencies(64, 10000.0).cuda())
        return randn(rows, 32, 128), turns, randn(rows, 32) * 2.0 ** -torch.arange(rows, device="cuda")[:, None]

    @staticmethod
    def wanted(query: tuple[Tensor, Tensor, Tensor], row: int, keys: Tensor) -> Tensor:
        q, turns, weights = query
        rounded = index_mxfp4(rope_reference.rotate(q, turns[:, None])).float()[row][None, None]
        factors = weights[row].float()[None, None] * 0.25
        return index_reference.index_scores(rounded, keys[None], factors)[0, 0]

    @pytest.mark.parametrize(("page_size", "ratio"), [(64, 1), (64, 2), (16, 2), (8, 2), (256, 1), (2, 1), (192, 1)])
    @pytest.mark.parametrize("grouped", [False, True], ids=["single rows", "groups"])
    def test_against_pytorch(self, page_size: int, ratio: int, grouped: bool) -> None:
        from deepinfer.ops.rows import nvidia

        torch.manual_seed(page_size)
        index, keys = self.index(page_size, ratio)
        index = index if grouped else self.single(index)
        query = self.query(len(index.slots))
        made = nvidia.index_scores(*query, 0.25, index)
        for row, seen in enumerate(index.visible.tolist()):
            if seen:
                wanted = self.wanted(query, row, keys[row // 3])[:seen]
                assert relative(made[row, :seen], wanted) < (2e-2 if page_size == 2 else 1e-3 if grouped else 1e-4)
        again = nvidia.index_scores(*query, 0.25, index)
        assert all(torch.equal(again[row, :n], made[row, :n]) for row, n in enumerate(index.visible.tolist()))

    @pytest.mark.parametrize(("page_size", "block"), [(64, 8), (64, 64), (16, 4), (64, 2)])
    def test_candidates(self, page_size: int, block: int) -> None:
        from deepinfer.ops.rows import nvidia

        index, keys = self.index(page_size, 1)
        rows, count = len(index.slots), 120 // block + 1
        blocks = torch.full((rows, count), -1, dtype=torch.int32, device="cuda")
        for row, seen in enumerate(index.visible.tolist()):
            kept = torch.randperm(-(-seen // block), device="cuda")[: count - 1].sort().values
            blocks[row, count - len(kept) :] = kept.int()
        listed = replace(self.single(index), blocks=blocks, block=block, length=count * block)
        query = self.query(rows)
        made = nvidia.index_scores(*query, 0.25, listed)
        places = (blocks[..., None] * block + torch.arange(block, device="cuda")).flatten(1)
        allowed = (blocks >= 0).repeat_interleave(block, 1) & (places < index.visible[:, None])
        assert torch.equal(made > -torch.inf, allowed)
        for row in range(rows):
            if allowed[row].any():
                wanted = self.wanted(query, row, keys[row // 3])[places[row][allowed[row]].long()]
                assert relative(made[row][allowed[row]], wanted) < (2e-2 if block == 2 else 1e-4)


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("listed", [False, True], ids=["all", "candidates"])
@pytest.mark.parametrize("seen", [5, 300, 700, 8192, 8200, 16384], ids=str)
def test_best_entries(rows: int, listed: bool, seen: int) -> None:
    """The same entries as PyTorch's; candidates have hidden columns of -inf among the others and at their end."""
    from deepinfer.ops.rows import nvidia
    from deepinfer.ops.rows import torch as plain

    torch.manual_seed(seen)
    visible = torch.randint(max(1, seen - 90), seen + 1, (rows,), device="cuda", dtype=torch.int32)
    table = torch.randperm(3 * 400, device="cuda").view(3, 400)
    slots = torch.randint(0, 3, (rows,), device="cuda", dtype=torch.int32)
    blocks = torch.stack([torch.randperm(3000, device="cuda")[:2048].sort().values for _ in range(rows)]).int()
    blocks[:, : max(0, 2048 - seen // 8)] = -1
    scores = torch.randn(rows, 16384, device="cuda")
    if listed:
        places = (blocks[..., None] * 8 + torch.arange(8, device="cuda")).flatten(1)
        scores[(places < 0) | (places >= 20000)] = -torch.inf
    else:
        scores[torch.arange(16384, device="cuda") >= visible[:, None]] = torch.nan
    index = Index(
        keys=torch.empty(0, 68, dtype=torch.uint8, device="cuda"),
        page_table=table,
        page_size=64,
        ratio=1,
        slots=slots,
        visible=torch.full_like(visible, 20000) if listed else visible,
        length=16384,
        group_slots=slots,
        group_firsts=slots,
        group_counts=slots,
        blocks=blocks if listed else None,
        block=8,
    )
    made, wanted = (module.best_entries(scores, index, 512) for module in (nvidia, plain))
    assert torch.equal(made.sort(-1).values, wanted.sort(-1).values)
    assert torch.equal(nvidia.best_entries(scores, index, 512), made)
