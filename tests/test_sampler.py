"""The sampler: greedy is the argmax, a draw follows the weights, and a row's draw is its own."""

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deepinfer.core.request import TEXT, Request
from deepinfer.core.sampled import SampledRow, TokenMasks
from deepinfer.core.sampling_params import SamplingParams
from deepinfer.sampling.sampler import Sampler

Row = tuple[SamplingParams, int, int]
"""Parameters, seed, position of the token to be drawn."""


def sample(logits: Tensor, rows: Sequence[Row], masks: TokenMasks | None = None) -> list[int]:
    """Draw once for rows of different requests; nothing is forbidden."""
    sampler = Sampler(torch.zeros(logits.shape[-1], dtype=torch.bool))
    for number, (params, seed, _) in enumerate(rows):
        sampler.admit(number, Request(0, None, (1,), (TEXT,), (), params, seed))
    places = [SampledRow(number, number, position) for number, (_, _, position) in enumerate(rows)]
    tokens: list[int] = sampler.sample(logits.clone(), places, masks).tokens.tolist()
    return tokens


def at(temperature: float, seed: int, position: int) -> Row:
    return SamplingParams(temperature), seed, position


def test_greedy_takes_the_most_probable_token_of_each_row() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, -1.0, 4.0]])
    assert sample(logits, [at(0, 1, 0), at(0, 2, 0)]) == [1, 0]


@settings(max_examples=50)
@given(seed=st.integers(0, 2**64 - 1), position=st.integers(0, 2**40), others=st.integers(1, 6), where=st.data())
def test_a_draw_does_not_depend_on_its_neighbours(seed: int, position: int, others: int, where: st.DataObject) -> None:
    row = where.draw(st.integers(0, others))
    logits = torch.randn(others + 1, 50, generator=torch.Generator().manual_seed(position % 1000))
    rows = [at(1.0, index + 1, index) for index in range(others + 1)]
    rows[row] = at(1.0, seed, position)
    alone = sample(logits[row : row + 1], [rows[row]])
    assert sample(logits, rows)[row] == alone[0]


def test_greedy_and_drawn_rows_share_a_batch() -> None:
    logits = torch.tensor([[0.0, 9.0], [0.0, -math.inf], [7.0, 0.0]])
    assert sample(logits, [at(0, 0, 0), at(1.5, 3, 3), at(0, 0, 0)]) == [1, 0, 0]


@pytest.mark.parametrize("temperature", [1e-320, 1e-8, 1.0, 1e300], ids=str)
def test_extreme_temperatures_stay_within_the_allowed_tokens(temperature: float) -> None:
    logits = torch.tensor([[1e4, -1e4, -math.inf, 3e38]])
    for position in range(50):
        assert sample(logits, [at(temperature, 5, position)])[0] != 2


def test_tiny_temperature_is_greedy_in_the_limit() -> None:
    logits = torch.randn(8, 100, generator=torch.Generator().manual_seed(0))
    assert sample(logits, [at(1e-6, row, 7) for row in range(8)]) == logits.argmax(-1).tolist()


def test_masks_bind_their_rows_only() -> None:
    """Row 1 may take tokens 33 and 64 only, row 2 none but 0; row 0 is free."""
    logits = torch.arange(70.0).repeat(3, 1)
    bits = torch.tensor([[0, 2, 1], [1, 0, 0]], dtype=torch.int32)
    masks = TokenMasks(torch.tensor([1, 2]), bits)
    assert sample(logits, [at(0, 0, 0)] * 3, masks) == [69, 64, 0]
    assert {sample(logits, [at(30, 0, position)] * 3, masks)[1] for position in range(40)} == {33, 64}


def test_the_sign_bit_of_a_mask_is_a_token_like_any_other() -> None:
    masks = TokenMasks(torch.tensor([0]), torch.tensor([[-(2**31), 0]], dtype=torch.int32))
    assert sample(torch.zeros(1, 40), [at(1, 0, 0)], masks) == [31]
