"""The sampler: greedy is the argmax, a draw follows the softmax, and a row's draw is its own."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.sampling.random import Purpose, uniform
from deepinfer.sampling.sampler import Draw, sample


def test_greedy_takes_the_most_probable_token_of_each_row() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, -1.0, 4.0]])
    assert sample(logits, [Draw(0, 1, 0), Draw(0, 2, 0)]) == [1, 0]


def test_draws_follow_the_softmax_at_the_given_temperature() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -math.inf])
    rows = 20_000
    tokens = sample(logits.expand(rows, 4), [Draw(0.7, 11, position) for position in range(rows)])
    share = torch.bincount(torch.tensor(tokens), minlength=4) / rows
    expected = torch.softmax(logits / 0.7, dim=0)
    # Five standard deviations of a binomial share at 20,000 draws are below 0.018.
    assert torch.allclose(share, expected, atol=0.018)
    assert share[3] == 0


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**64 - 1), position=st.integers(0, 2**40), others=st.integers(1, 6), at=st.data())
def test_a_draw_does_not_depend_on_its_neighbours(seed: int, position: int, others: int, at: st.DataObject) -> None:
    row = at.draw(st.integers(0, others))
    logits = torch.randn(others + 1, 50, generator=torch.Generator().manual_seed(position % 1000))
    draws = [Draw(1.0, index + 1, index) for index in range(others + 1)]
    draws[row] = Draw(1.0, seed, position)
    alone = sample(logits[row : row + 1], [draws[row]])
    assert sample(logits, draws)[row] == alone[0]


def test_greedy_and_drawn_rows_share_a_batch() -> None:
    logits = torch.tensor([[0.0, 9.0], [0.0, -math.inf], [7.0, 0.0]])
    assert sample(logits, [Draw(0, 0, 0), Draw(1.5, 3, 3), Draw(0, 0, 0)]) == [1, 0, 0]


@pytest.mark.parametrize("temperature", [1e-320, 1e-8, 1.0, 1e300], ids=str)
def test_extreme_temperatures_stay_within_the_allowed_tokens(temperature: float) -> None:
    logits = torch.tensor([[1e4, -1e4, -math.inf, 3e38]])
    for position in range(50):
        assert sample(logits, [Draw(temperature, 5, position)])[0] != 2


def test_tiny_temperature_is_greedy_in_the_limit() -> None:
    logits = torch.randn(8, 100, generator=torch.Generator().manual_seed(0))
    draws = [Draw(1e-6, row, 7) for row in range(8)]
    assert sample(logits, draws) == logits.argmax(-1).tolist()


@settings(max_examples=200)
@given(seed=st.integers(0, 2**64 - 1), position=st.integers(0, 2**62))
def test_a_number_is_a_function_of_seed_and_position(seed: int, position: int) -> None:
    first = uniform(seed, position, Purpose.SAMPLE)
    assert 0 <= first < 1
    assert first == uniform(seed, position, Purpose.SAMPLE)
    assert first != uniform(seed ^ 1, position, Purpose.SAMPLE)
    assert first != uniform(seed, position + 1, Purpose.SAMPLE)
