"""SamplingParams: what it takes, and that a wrong value says what would be right."""

import math
import pickle
from dataclasses import replace
from typing import Any

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
        ("top_p", -0.1, "from 0 to 1"),
        ("top_p", 1.5, "from 0 to 1"),
        ("top_p", math.nan, "from 0 to 1"),
        ("top_p", None, "from 0 to 1"),
        ("min_p", 2, "from 0 to 1"),
        ("min_p", False, "from 0 to 1"),
        ("top_k", -1, "whole number >= 0 (0: all tokens)"),
        ("top_k", 1.0, "whole number >= 0"),
        ("min_tokens", -1, "whole number >= 0"),
        ("min_tokens", 257, "up to max_tokens, which is 256"),
        ("stop", "", "none of them empty"),
        ("stop", ["a", ""], "none of them empty"),
        ("stop", b"a", "a string or a list of strings"),
        ("stop", [1], "a string or a list of strings"),
        ("stop", None, "a string or a list of strings"),
        ("presence_penalty", 2.5, "from -2 to 2"),
        ("frequency_penalty", -math.inf, "from -2 to 2"),
        ("repetition_penalty", 0, "from 0.01 to 100"),
        ("repetition_penalty", math.inf, "from 0.01 to 100"),
        ("logit_bias", {-1: 1.0}, "token ids to numbers of at most 1e9"),
        ("logit_bias", {"1": 1.0}, "token ids to numbers of at most 1e9"),
        ("logit_bias", {1: math.inf}, "token ids to numbers of at most 1e9"),
        ("logit_bias", {1: 2e9}, "token ids to numbers of at most 1e9"),
        ("logit_bias", {1: math.nan}, "token ids to numbers of at most 1e9"),
        ("logit_bias", [1, 2], "a mapping"),
        ("logprobs", -1, "from 0 to 1024"),
        ("logprobs", 1025, "from 0 to 1024"),
        ("logprobs", True, "from 0 to 1024"),
        ("prompt_logprobs", 0.5, "from 0 to 1024"),
        ("n", 0, "from 1 to"),
        ("n", 10**9, "from 1 to"),
        ("so_args", {}, "exactly one of regex, json_schema, ebnf"),
        ("so_args", {"regex": "a", "ebnf": "b"}, "exactly one of"),
        ("so_args", {"regex": "a", "other": 1}, "exactly one of"),
        ("so_args", {"json": "{}"}, "exactly one of"),
        ("so_args", "regex", "a mapping"),
    ],
)
def test_wrong_values_name_the_field_and_what_it_takes(field: str, value: object, accepted: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    message = str(caught.value)
    assert field in message
    assert accepted in message
    assert repr(value) in message


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"regex": 5}, "so_args['regex'] is 5; it takes a string"),
        ({"ebnf": None}, "so_args['ebnf'] is None; it takes a string"),
        ({"json_schema": 5}, "so_args['json_schema'] is 5; it takes a JSON schema"),
        ({"regex": "a", "partial": 1}, "so_args['partial'] is 1; it takes True or False"),
    ],
)
def test_a_wrong_part_of_so_args_is_named(given: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(so_args=given)
    assert message in str(caught.value)


def test_one_stop_string_is_a_list_of_one() -> None:
    assert SamplingParams(stop="ab").stop == ("ab",)
    assert replace(SamplingParams(stop=["ab", "c"]), n=2).stop == ("ab", "c")


def test_a_long_value_is_cut_in_the_message() -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(stop=[""] * 10_000)
    assert len(str(caught.value)) < 400


def test_later_changes_to_the_callers_list_do_not_reach_the_params() -> None:
    stops, words, bias, schema = [5], ["a"], {3: 1.0}, {"json_schema": {"type": "object"}}
    params = SamplingParams(stop_token_ids=stops, stop=words, logit_bias=bias, so_args=schema)
    stops.append(6)
    words.append("b")
    bias[4] = 2.0
    schema["json_schema"]["type"] = "array"
    assert (params.stop_token_ids, params.stop, params.logit_bias) == ((5,), ("a",), {3: 1.0})
    assert params.so_args == {"json_schema": {"type": "object"}}


def test_params_survive_pickling() -> None:
    params = SamplingParams(logit_bias={1: -math.inf}, so_args={"regex": "a*"}, stop="x", n=3)
    assert pickle.loads(pickle.dumps(params)) == params


@given(
    st.fixed_dictionaries(
        {
            "temperature": st.floats(0, 1e300) | st.integers(0, 5),
            "max_tokens": st.none() | st.integers(1, 10**9),
            "stop_token_ids": st.lists(st.integers(0, 10**6)),
            "seq_seed": st.none() | st.integers(0, 2**64 - 1),
            "top_p": st.floats(0, 1),
            "top_k": st.integers(0, 10**9),
            "min_p": st.floats(0, 1),
            "presence_penalty": st.floats(-2, 2),
            "frequency_penalty": st.floats(-2, 2),
            "repetition_penalty": st.floats(0.01, 100),
            "logit_bias": st.none() | st.dictionaries(st.integers(0, 10**6), st.floats(-1e9, 1e9) | st.just(-math.inf)),
            "logprobs": st.none() | st.integers(0, 1024),
            "prompt_logprobs": st.none() | st.integers(0, 1024),
            "n": st.integers(1, 4096),
        }
    )
)
def test_every_value_in_range_is_taken(values: dict[str, Any]) -> None:
    params = SamplingParams(**values)
    assert {**values, "stop_token_ids": tuple(values["stop_token_ids"])} == {
        name: getattr(params, name) for name in values
    }
