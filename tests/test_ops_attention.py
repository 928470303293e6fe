"""Selection and sparse attention against the reference's, group-shaped, with garbage where nothing may be read."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deepinfer.ops import cache_rows, indexer
from deepinfer.ops.sparse_attention import sparse_attention
from deepinfer.ops.sparse_attention import torch as sparse_attention_torch
from deepinfer.reference import attention as reference_attention
from deepinfer.reference import indexer as reference_indexer
from deepinfer.reference.indexer import Ties

each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def sets(places: Tensor) -> list[set[int]]:
    """The chosen places of every row."""
    return [{place for place in row if place >= 0} for row in places.flatten(0, -2).tolist()]


class TestScores:
    @each_dtype
    @pytest.mark.parametrize(("stretches", "rows", "keys"), [(1, 1, 1), (3, 1, 20), (2, 5, 7), (1, 4, 0), (2, 0, 3)])
    def test_index_scores(self, dtype: torch.dtype, stretches: int, rows: int, keys: int) -> None:
        q, k = randn(stretches, rows, 4, 32, dtype=dtype), randn(stretches, keys, 32, seed=1, dtype=dtype)
        weights = randn(stretches, rows, 4, seed=2, dtype=dtype)
        made = indexer.index_scores(q, k, weights)
        wanted = reference_indexer.index_scores(q, k, weights)
        assert made.dtype is torch.float32
        assert torch.allclose(made, wanted, atol=1e-4 if dtype is torch.float32 else 0.3)

    @each_dtype
    def test_row_scores_are_index_scores_of_gathered_keys(self, dtype: torch.dtype) -> None:
        q, k, weights = (
            randn(*shape, seed=i, dtype=dtype) for i, shape in enumerate([(2, 3, 4, 32), (2, 9, 32), (2, 3, 4)])
        )
        places = torch.randint(0, 9, (2, 3, 5), generator=torch.Generator().manual_seed(0))
        made = indexer.row_scores(q, k[torch.arange(2)[:, None, None], places], weights)
        wanted = indexer.index_scores(q, k, weights).gather(-1, places)
        assert torch.allclose(made, wanted, atol=1e-4 if dtype is torch.float32 else 0.3)


class TestBest:
    @settings(max_examples=200, deadline=None)
    @given(st.data())
    def test_positions_equal_a_stable_sort(self, data: st.DataObject) -> None:
        """Few values, so that ties abound; both zeros, infinities and the smallest numbers among them."""
        size, count = data.draw(st.integers(1, 30)), data.draw(st.integers(1, 12))
        values = [0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, -torch.inf, torch.inf, 3.4e38]
        scores = torch.tensor([data.draw(st.lists(st.sampled_from(values), min_size=size, max_size=size))])
        order = scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]
        wanted = torch.where(scores.gather(-1, order) == -torch.inf, -1, order)
        assert torch.equal(indexer.best_positions(scores, count), wanted)

    @pytest.mark.parametrize("size", [0, 1, 5, 300])
    def test_positions_against_the_reference(self, size: int) -> None:
        scores = randn(2, 9, size)
        scores[:, ::2] = scores[:, ::2].round()
        allowed = torch.arange(size) < torch.tensor([0, 1, 3, 5, 17, 100, 200, 299, 300])[:, None]
        made = indexer.best_positions(scores.masked_fill(~allowed, -torch.inf), 16)
        assert sets(made) == sets(reference_indexer.select(scores, allowed.expand(2, -1, -1), 16, Ties.LOWEST))

    def test_positions_do_not_depend_on_what_else_is_scored(self) -> None:
        scores = randn(4, 50).round()
        padded = torch.cat((scores, torch.full((4, 37), -torch.inf)), dim=-1)
        assert torch.equal(indexer.best_positions(scores, 9), indexer.best_positions(padded, 9))

    @pytest.mark.parametrize("block", [1, 4, 8])
    @pytest.mark.parametrize("budget", [1, 3, 100])
    @pytest.mark.parametrize("size", [1, 8, 61])
    def test_blocks_against_the_reference(self, block: int, budget: int, size: int) -> None:
        scores = randn(2, 6, size).round()
        visible = torch.tensor([[0, 1, 5, 8, 30, 61]]).clamp(max=size).expand(2, -1)
        allowed = torch.arange(size) < visible[..., None]
        blocks = indexer.best_blocks(scores.masked_fill(~allowed, -torch.inf), visible, block, budget)
        assert bool((blocks.diff(dim=-1) >= 0).all())
        places = indexer.block_positions(blocks, block)
        wanted = reference_indexer.candidate_positions(scores, allowed, block, budget, Ties.LOWEST)
        for made, row, limit in zip(sets(places), wanted.flatten(0, 1), visible.flatten().tolist(), strict=True):
            assert {place for place in made if place < limit} == set(row.nonzero()[:, 0].tolist())

    def test_block_positions_keep_the_order_and_the_gaps(self) -> None:
        assert indexer.block_positions(torch.tensor([[-1, 0, 5]]), 3).tolist() == [[-1, -1, -1, 0, 1, 2, 15, 16, 17]]


@dataclass(frozen=True)
class Case:
    """Sizes of a group; `window` counts a row's own key."""

    stretches: int = 2
    rows: int = 5
    heads: int = 3
    dim: int = 32
    window: int = 4
    far: int = 9
    chosen: int = 6


CASES = {
    "usual": Case(),
    "decode": Case(stretches=7, rows=1),
    "one row": Case(stretches=1, rows=1, chosen=1, far=1),
    "many rows": Case(stretches=1, rows=150, window=20, far=40),
    "just a block": Case(rows=64),
    "window of one": Case(window=1),
    "nothing chosen": Case(chosen=0),
    "one head": Case(heads=1, dim=64),
}


def inputs(case: Case, dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(case.rows)
    shape = (case.stretches, case.rows)
    return {
        "q": randn(*shape, case.heads, case.dim, dtype=dtype),
        "near": randn(case.stretches, case.window - 1 + case.rows, case.dim, seed=1, dtype=dtype),
        "seen": torch.randint(1, case.window + 1, shape, generator=generator),
        "far": randn(case.stretches, case.far, case.dim, seed=2, dtype=dtype),
        "chosen": torch.randint(-1, case.far, (*shape, case.chosen), generator=generator),
        "sink": randn(case.heads, seed=3),
    }


def one_by_one(q: Tensor, near: Tensor, seen: Tensor, far: Tensor, chosen: Tensor, sink: Tensor) -> Tensor:
    """Row by row through the reference's softmax."""
    out, before = torch.empty_like(q), near.shape[1] - q.shape[1]
    for stretch in range(q.shape[0]):
        for row in range(q.shape[1]):
            own = before + row
            places = chosen[stretch, row]
            keys = torch.cat((near[stretch, own + 1 - seen[stretch, row] : own + 1], far[stretch, places[places >= 0]]))
            mask = torch.ones(1, 1, len(keys), dtype=torch.bool)
            out[stretch, row] = reference_attention.attend(q[stretch, row][None, None], keys[None, None], mask, sink)
    return out


class TestSparseAttention:
    @each_dtype
    @pytest.mark.parametrize("case", CASES.values(), ids=CASES)
    def test_against_the_reference(self, case: Case, dtype: torch.dtype) -> None:
        given = inputs(case, dtype)
        made = sparse_attention(**given)
        assert made.dtype is dtype
        assert torch.allclose(made.float(), one_by_one(**given).float(), atol=1e-5 if dtype is torch.float32 else 3e-2)

    @pytest.mark.parametrize("case", CASES.values(), ids=CASES)
    def test_without_far_keys(self, case: Case) -> None:
        given = inputs(case, torch.float32)
        wanted = one_by_one(**{**given, "chosen": given["chosen"][..., :0]})
        assert torch.allclose(sparse_attention(**{**given, "far": None, "chosen": None}), wanted, atol=1e-5)
        assert torch.allclose(
            sparse_attention(**{**given, "far": given["far"][:, :0], "chosen": given["chosen"][..., :0]}),
            wanted,
            atol=1e-5,
        )

    def test_what_is_not_seen_does_not_matter(self) -> None:
        """Huge values before the stretches and at odd far places, which no row sees."""
        given = inputs(CASES["many rows"], torch.float32)
        given["seen"] = given["seen"].minimum(torch.arange(150) + 1)
        given["chosen"] = torch.where(given["chosen"] % 2 == 0, given["chosen"], -1)
        wanted = sparse_attention(**given)
        given["near"][:, :19], given["far"][:, 1::2] = 1e30, 1e30
        assert torch.equal(sparse_attention(**given), wanted)

    def test_a_stretch_of_nan_harms_no_other(self) -> None:
        given = inputs(CASES["usual"], torch.float32)
        wanted = sparse_attention(**given)
        given["near"][0], given["far"][0] = torch.nan, torch.nan
        made = sparse_attention(**given)
        assert made[0].isnan().all()
        assert torch.equal(made[1], wanted[1])

    def test_blocks_of_rows_do_not_show(self, monkeypatch: pytest.MonkeyPatch) -> None:
        given = inputs(CASES["many rows"], torch.float32)
        wanted = sparse_attention(**given)
        for rows in (1, 7, 149, 150):
            monkeypatch.setattr(sparse_attention_torch, "ROWS_CPU", rows)
            assert torch.allclose(sparse_attention(**given), wanted, atol=1e-6)

    def test_a_sink_takes_weight_and_gives_nothing(self) -> None:
        given = inputs(CASES["usual"], torch.float32)
        given["sink"] = torch.full_like(given["sink"], 80.0)
        assert sparse_attention(**given).abs().max() < 1e-6


class TestCacheRows:
    def test_invalid_rows_are_zeros_wherever_they_point(self) -> None:
        cache = torch.full((5, 3), 255, dtype=torch.uint8)
        cache[2] = torch.tensor([1, 2, 3], dtype=torch.uint8)
        addresses = torch.tensor([[2, 99], [-7, 2]])
        valid = torch.tensor([[True, False], [False, True]])
        made = cache_rows.load_rows(cache, addresses, valid)
        assert made.tolist() == [[[1, 2, 3], [0, 0, 0]], [[0, 0, 0], [1, 2, 3]]]

    @pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.int64])
    def test_stored_rows_are_loaded(self, dtype: torch.dtype) -> None:
        cache, rows = torch.zeros(6, 2, dtype=dtype), torch.arange(6).view(3, 2).to(dtype)
        addresses = torch.tensor([5, 0, 3])
        cache_rows.store_rows(cache, addresses, rows)
        assert torch.equal(cache_rows.load_rows(cache, addresses, torch.ones(3, dtype=torch.bool)), rows)
        assert cache[[1, 2, 4]].eq(0).all()

    def test_no_rows(self) -> None:
        cache, none = torch.ones(2, 3), torch.empty(0, dtype=torch.int64)
        cache_rows.store_rows(cache, none, torch.empty(0, 3))
        assert cache.eq(1).all()
        assert cache_rows.load_rows(cache, none, none.bool()).shape == (0, 3)
        assert cache_rows.load_rows(cache, none.view(0, 4), none.view(0, 4).bool()).shape == (0, 4, 3)
