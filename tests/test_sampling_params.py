"""SamplingParams: what it takes, and that a wrong value says what would be right."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.core.errors import RequestError
from deepinfer.core.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("field", "value", "accepted"),
    [
        ("temperature", -0.1, "finite number >= 0"),
        ("temperature", math.nan, "finite number >= 0"),
        ("temperature", math.inf, "finite number >= 0"),
        ("temperature", "hot", "finite number >= 0"),
        ("temperature", True, "finite number >= 0"),
        ("max_tokens", 0, "whole number >= 1"),
        ("max_tokens", 2.5, "whole number >= 1"),
        ("max_tokens", True, "whole number >= 1"),
        ("stop_token_ids", [-1], "list of token ids"),
        ("stop_token_ids", "12", "list of token ids"),
        ("stop_token_ids", 3, "list of token ids"),
        ("ignore_eos", 1, "True or False"),
        ("seq_seed", -1, "0 to 2^64 - 1"),
        ("seq_seed", 2**64, "0 to 2^64 - 1"),
        ("seq_seed", 1.0, "0 to 2^64 - 1"),
    ],
)
def test_wrong_values_name_the_field_and_what_it_takes(field: str, value: object, accepted: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    message = str(caught.value)
    assert field in message
    assert accepted in message
    assert repr(value) in message


def test_later_changes_to_the_callers_list_do_not_reach_the_params() -> None:
    stops = [5]
    params = SamplingParams(stop_token_ids=stops)
    stops.append(6)
    assert params.stop_token_ids == (5,)


@given(
    temperature=st.floats(0, 1e300) | st.integers(0, 5),
    max_tokens=st.none() | st.integers(1, 10**9),
    stops=st.lists(st.integers(0, 10**6)),
    seed=st.none() | st.integers(0, 2**64 - 1),
)
def test_every_value_in_range_is_taken(
    temperature: float, max_tokens: int | None, stops: list[int], seed: int | None
) -> None:
    params = SamplingParams(temperature, max_tokens, stops, False, seed)
    assert (params.temperature, params.max_tokens, params.seq_seed) == (temperature, max_tokens, seed)
