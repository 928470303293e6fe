"""Compressed sparse attention against loops over queries and keys."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from deepinfer.reference.attention import Rows, SharedKV, attend, selected_keys, sparse_attention, window_keys
from deepinfer.reference.compressor import pool_pairs, visible_count
from deepinfer.reference.indexer import Selection, Ties, candidate_positions, index_scores, select


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rows(count: int, batch: int = 1, first: int = 0, cut: list[int] | None = None) -> Rows:
    images = torch.zeros(batch, count, dtype=torch.bool)
    return Rows(first, torch.arange(first, first + count), images, None if cut is None else torch.tensor(cut))


class TestCompressor:
    def test_pool_pairs_formula(self) -> None:
        values, scores = randn(1, 6, 3), randn(1, 6, 3, seed=1)
        pooled = pool_pairs(values, scores)
        for pair in range(3):
            for c in range(3):
                a, b = (math.exp(scores[0, 2 * pair + i, c]) for i in range(2))
                expected = (a * values[0, 2 * pair, c] + b * values[0, 2 * pair + 1, c]) / (a + b)
                torch.testing.assert_close(pooled[0, pair, c], expected)

    @pytest.mark.parametrize("tokens", [0, 1, 2, 3, 7, 8])
    def test_an_odd_token_waits(self, tokens: int) -> None:
        values, scores = randn(2, tokens, 3), randn(2, tokens, 3, seed=1)
        pooled = pool_pairs(values, scores)
        assert pooled.shape == (2, tokens // 2, 3)
        even = tokens // 2 * 2
        assert torch.equal(pooled, pool_pairs(values[:, :even], scores[:, :even]))

    def test_visible_count(self) -> None:
        at = torch.arange(6)
        assert visible_count(at, 1).tolist() == [1, 2, 3, 4, 5, 6]
        assert visible_count(at, 2).tolist() == [0, 1, 1, 2, 2, 3]


class TestAttend:
    def test_formula(self) -> None:
        q, keys, sink = randn(1, 2, 3, 8), randn(1, 2, 5, 8, seed=1), randn(3, seed=2)
        mask = torch.tensor([[[True, False, True, True, False], [True] * 5]])
        out = attend(q, keys, mask, sink)
        for r in range(2):
            for h in range(3):
                seen = [k for k in range(5) if mask[0, r, k]]
                scores = [math.exp((q[0, r, h] @ keys[0, r, k]).item() / math.sqrt(8)) for k in seen]
                total = sum(scores) + math.exp(sink[h])
                expected = sum(s / total * keys[0, r, k] for s, k in zip(scores, seen, strict=True))
                torch.testing.assert_close(out[0, r, h], expected)

    def test_no_keys_give_zeros(self) -> None:
        q, keys = randn(1, 2, 3, 8), randn(1, 2, 5, 8, seed=1)
        out = attend(q, keys, torch.zeros(1, 2, 5, dtype=torch.bool), torch.zeros(3))
        assert torch.equal(out, torch.zeros_like(out))
        assert torch.equal(attend(q, keys[:, :, :0], torch.zeros(1, 2, 0, dtype=torch.bool), torch.zeros(3)), out)

    def test_a_large_sink_takes_everything(self) -> None:
        q, keys = randn(1, 1, 1, 8), randn(1, 1, 5, 8, seed=1)
        out = attend(q, keys, torch.ones(1, 1, 5, dtype=torch.bool), torch.tensor([60.0]))
        assert out.abs().max() < 1e-20


class TestWindow:
    @pytest.mark.parametrize("window", [1, 3, 6])
    @pytest.mark.parametrize("count", [1, 4, 9])
    def test_the_last_keys(self, window: int, count: int) -> None:
        kv = randn(2, count, 4)
        keys, mask = window_keys(kv, rows(count, 2), window)
        for t in range(count):
            seen = list(range(max(t - window + 1, 0), t + 1))
            assert mask[0, t].nonzero()[:, 0].tolist() == list(range(window - len(seen), window))
            assert torch.equal(keys[1, t, mask[1, t]], kv[1, seen])

    @given(st.integers(1, 12), st.integers(1, 6), st.lists(st.integers(0, 12), min_size=2, max_size=2))
    def test_a_cut_hides_what_lies_before_it(self, count: int, window: int, cuts: list[int]) -> None:
        kv = torch.arange(count).float().expand(2, count)[..., None]
        keys, mask = window_keys(kv, rows(count, 2, cut=cuts), window)
        for b, cut in enumerate(cuts):
            for t in range(count):
                low = max(t - window + 1, 0, cut if t >= cut else 0)
                assert keys[b, t, mask[b, t], 0].tolist() == list(range(low, t + 1))

    def test_rows_of_a_suffix_do_not_see_before_it(self) -> None:
        suffix = rows(9, 2).after(4, torch.tensor([4, 6]))
        assert (suffix.first, suffix.positions.tolist(), suffix.is_image.shape) == (4, [4, 5, 6, 7, 8], (2, 5))
        keys, mask = window_keys(torch.arange(4.0, 9).expand(2, 5)[..., None], suffix, 3)
        seen = [[keys[b, r, mask[b, r], 0].tolist() for r in range(5)] for b in range(2)]
        assert seen[0] == [[4], [4, 5], [4, 5, 6], [5, 6, 7], [6, 7, 8]]
        assert seen[1] == [[4], [4, 5], [6], [6, 7], [6, 7, 8]]


class TestSparseAttention:
    def test_window_and_selection_share_one_softmax(self) -> None:
        q, kv, latents, sink = randn(1, 6, 2, 8), randn(1, 6, 8, seed=1), randn(1, 3, 8, seed=2), randn(2, seed=3)
        chosen = torch.tensor([[[-1, -1], [0, -1], [0, -1], [1, 0], [-1, 1], [2, 0]]])
        shared = SharedKV(latents, latents, 2, Selection(chosen))
        out = sparse_attention(q, kv, shared, rows(6), sink, 3)
        for t in range(6):
            keys = [*kv[0, max(t - 2, 0) : t + 1], *(latents[0, j] for j in chosen[0, t].tolist() if j >= 0)]
            stacked = torch.stack(keys)[None, None]
            expected = attend(q[:, t : t + 1], stacked, torch.ones(1, 1, len(keys), dtype=torch.bool), sink)
            torch.testing.assert_close(out[:, t : t + 1], expected)

    def test_window_only(self) -> None:
        q, kv, sink = randn(1, 5, 2, 8), randn(1, 5, 8, seed=1), randn(2, seed=3)
        empty = SharedKV(kv[:, :0], kv[:, :0], 2, Selection(torch.zeros(1, 5, 0, dtype=torch.int64)))
        expected = attend(q, *window_keys(kv, rows(5), 3), sink)
        assert torch.equal(sparse_attention(q, kv, None, rows(5), sink, 3), expected)
        assert torch.equal(sparse_attention(q, kv, empty, rows(5), sink, 3), expected)

    def test_gather(self) -> None:
        latents = randn(2, 4, 3)
        keys, mask = selected_keys(latents, torch.tensor([[[3, -1]], [[0, 2]]]))
        assert mask.tolist() == [[[True, False]], [[True, True]]]
        assert torch.equal(keys[0, 0, 0], latents[0, 3])
        assert torch.equal(keys[1, 0], latents[1, [0, 2]])


class TestIndexer:
    def test_scores_formula(self) -> None:
        q, keys, weights = randn(1, 2, 3, 8), randn(1, 4, 8, seed=1), randn(1, 2, 3, seed=2)
        found = index_scores(q, keys, weights)
        for r in range(2):
            for s in range(4):
                terms = (max((q[0, r, h] @ keys[0, s]).item(), 0) * weights[0, r, h].item() for h in range(3))
                assert found[0, r, s].item() == pytest.approx(sum(terms), abs=1e-5)

    def test_scores_round_twice_in_bf16(self) -> None:
        q, keys, weights = randn(1, 1, 2, 8).bfloat16(), randn(1, 1, 8, seed=1).bfloat16(), randn(1, 1, 2).bfloat16()
        products = [(q[0, 0, h].double() @ keys[0, 0].double()).bfloat16().relu() for h in range(2)]
        terms = [(product * weights[0, 0, h]).float() for h, product in enumerate(products)]
        found = index_scores(q, keys, weights)
        assert found.dtype is torch.float32
        torch.testing.assert_close(found[0, 0, 0], terms[0] + terms[1], atol=0, rtol=2e-2)

    @given(st.data())
    def test_select_against_sorting(self, data: st.DataObject) -> None:
        size, count = data.draw(st.integers(0, 9)), data.draw(st.integers(1, 6))
        scores = data.draw(st.lists(st.integers(-2, 2), min_size=size, max_size=size))  # many ties
        allowed = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
        found = select(torch.tensor([[scores]]).float(), torch.tensor([[allowed]]).bool(), count, Ties.LOWEST)
        order = sorted((j for j in range(size) if allowed[j]), key=lambda j: (-scores[j], j))
        assert found.shape == (1, 1, min(count, size))
        assert [j for j in found[0, 0].tolist() if j >= 0] == order[:count]

    def test_ties_do_not_depend_on_the_length(self) -> None:
        """A row padded with forbidden positions selects the same: zeros of closed heads tie often."""
        scores = torch.zeros(1, 1, 40)
        allowed = torch.arange(40)[None, None] < 20
        short = select(scores[..., :20], allowed[..., :20], 8, Ties.LOWEST)
        assert torch.equal(short, select(scores, allowed, 8, Ties.LOWEST))

    def test_topk_ties_are_those_of_torch(self) -> None:
        scores = torch.randint(0, 3, (1, 4, 50), generator=torch.Generator().manual_seed(0)).float()
        found = select(scores, torch.ones(1, 4, 50, dtype=torch.bool), 8, Ties.TOPK)
        assert torch.equal(found, scores.topk(8).indices)


class TestCandidates:
    @given(st.data())
    def test_against_sorting(self, data: st.DataObject) -> None:
        size, block, count = (data.draw(st.integers(low, 12)) for low in (0, 1, 1))
        scores = data.draw(st.lists(st.integers(-5, 5), min_size=size, max_size=size))
        visible = data.draw(st.integers(0, size))
        allowed = torch.arange(size)[None, None] < visible
        found = candidate_positions(torch.tensor([[scores]]).float(), allowed, block, count, Ties.LOWEST)
        best = {b: max(scores[b * block : min((b + 1) * block, visible)]) for b in range(-(-visible // block))}
        order = sorted(best, key=lambda b: (b != max(best), -best[b], b))[:count]
        assert found[0, 0].nonzero()[:, 0].tolist() == [j for j in range(visible) if j // block in order]

    def test_the_newest_block_counts_within_the_budget(self) -> None:
        scores = torch.tensor([[[9.0, 8, 7, 6, 1, 0]]])
        kept = candidate_positions(scores, torch.ones(1, 1, 6, dtype=torch.bool), 2, 2, Ties.LOWEST)
        assert kept[0, 0].tolist() == [True, True, False, False, True, True]

    def test_no_positions(self) -> None:
        none = torch.zeros(2, 3, 0)
        assert candidate_positions(none, none.bool(), 4, 2, Ties.LOWEST).shape == (2, 3, 0)
