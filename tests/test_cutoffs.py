"""Cut-offs without a sort equal those of a sorted vocabulary, with ties, at any size."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deepinfer.sampling import cutoffs
from deepinfer.sampling.cutoffs import Limits, exclude
from deepinfer.sampling.weights import first_largest, pick, whole_weights


def kept(log_weights: Tensor, top_k: Any = 0, top_p: Any = 1.0, min_p: Any = 0.0) -> np.ndarray:
    rows = len(log_weights)
    limits = Limits(*(np.broadcast_to(np.array(value, dtype=np.float64), rows) for value in (top_k, top_p, min_p)))
    found: np.ndarray = exclude(log_weights.clone(), limits).numpy() > -np.inf
    return found


def sorted_out(row: Tensor, top_k: int, top_p: float) -> np.ndarray:
    """The same by sorting, exactly: over the whole weights."""
    weights = whole_weights(row[None])[0].numpy().astype(object)
    values = row.numpy()
    order = np.argsort(-values, kind="stable")
    least = values[order[top_k - 1]] if 0 < top_k < len(values) else -np.inf
    allowed = values >= least
    if top_p < 1:
        total = sum(weights[allowed])
        needed = min(max(int(np.ceil(np.float64(top_p) * np.float64(total))), 1), total)
        count = 0
        for place in order:
            count += weights[place]
            if count >= needed:
                least = max(least, values[place])
                break
    return (values >= least) & (values > -np.inf)


@settings(max_examples=150)
@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.integers(1, 700),
    levels=st.sampled_from([None, 2, 5, 50]),
    rows=st.lists(
        st.tuples(st.integers(0, 800), st.sampled_from([1.0, 0.0, 0.1, 0.5, 0.95, 0.999999])), min_size=1, max_size=4
    ),
    listed=st.sampled_from([1024, 10, 0]),
)
def test_it_is_what_a_sort_gives(
    seed: int, size: int, levels: int | None, rows: list[tuple[int, float]], listed: int
) -> None:
    random = np.random.default_rng(seed)
    values = random.standard_normal((len(rows), size)) * random.choice([0.1, 3, 30])
    if levels is not None:  # ties
        values = np.round(values * levels / 10) / levels
    values[random.random(values.shape) < random.choice([0, 0.3])] = -np.inf
    values[:, random.integers(size)] = max(values.max(), 0.0)
    log_weights = torch.tensor(values - values.max(-1, keepdims=True), dtype=torch.float32)
    top_k, top_p = (np.array(column, dtype=np.float64) for column in zip(*rows, strict=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cutoffs, "LONGEST_LIST", listed)
        found = kept(log_weights, top_k, top_p)
    for row in range(len(rows)):
        assert (found[row] == sorted_out(log_weights[row], int(top_k[row]), float(top_p[row]))).all()


def test_a_whole_vocabulary() -> None:
    values = torch.randn(3, 129_280, generator=torch.Generator().manual_seed(1)) * 3
    values -= values.amax(-1, keepdim=True)
    for top_k, top_p in ((50, 1.0), (5000, 1.0), (0, 0.9), (50, 0.9), (5000, 0.9)):
        found = kept(values, top_k, top_p)
        for row in range(3):
            assert (found[row] == sorted_out(values[row], top_k, top_p)).all()


@given(st.integers(1, 3), st.integers(1, 1100), st.integers(0, 2**32 - 1))
def test_the_first_of_the_largest(rows: int, size: int, seed: int) -> None:
    values = torch.randint(0, 5, (rows, size), generator=torch.Generator().manual_seed(seed)).float() - 9
    assert first_largest(values).tolist() == [row.index(max(row)) for row in values.tolist()]


@given(st.integers(1, 1100), st.integers(0, 2**32 - 1))
def test_a_number_picks_the_token_whose_share_it_falls_into(size: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(1, size, generator=generator) * 5
    values -= values.amax()
    values[torch.rand(1, size, generator=generator) < 0.3] = -torch.inf
    numbers = torch.tensor([0.0, np.nextafter(1, 0), *np.random.default_rng(seed).random(20)], dtype=torch.float64)
    weights = whole_weights(values)[0].tolist()
    total, found = sum(weights), pick(values.expand(len(numbers), -1), numbers).tolist()
    for number, token in zip(numbers.tolist(), found, strict=True):
        target = min(int(number * float(total)), total - 1) if total else 0
        assert not total or sum(weights[:token]) <= target < sum(weights[: token + 1])


def test_a_token_less_likely_than_two_to_the_minus_44_counts_as_nothing() -> None:
    values = torch.tensor([[0.0, -30.0, -30.6, -31.0, -200.0, -torch.inf]])
    assert (whole_weights(values)[0] > 0).tolist() == [True, True, False, False, False, False]
