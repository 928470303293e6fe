"""Whatever is passed as a prompt or a message, nothing but a `RequestError` comes out of admission."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepinfer import LLM, RequestError, SamplingParams

ONE = SamplingParams(temperature=0, max_tokens=1)
SCALARS = st.none() | st.booleans() | st.integers(-5, 300) | st.floats() | st.text(max_size=8) | st.binary(max_size=4)
KEYS = st.sampled_from(["role", "content", "type", "text", "image", "image_url", "url", "tool_calls", "prefix", "name"])
WORDS = st.sampled_from(["user", "assistant", "system", "tool", "text", "image", "image_url"])
JUNK = st.recursive(
    SCALARS | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": WORDS | JUNK, "content": JUNK}, optional={"tool_calls": JUNK, "prefix": JUNK}),
    min_size=1,
    max_size=3,
)


@pytest.fixture(scope="module")
def llm(tiny_checkpoint: Path) -> LLM:
    return LLM(tiny_checkpoint)


def answered_or_refused(output: Any) -> bool:
    if output.error is not None:
        return isinstance(output.error, RequestError) and output.finish_reason == "error" and str(output.error) != ""
    return len(output.token_ids) == 1


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(junk=JUNK)
def test_junk_among_prompts_is_answered_or_refused(llm: LLM, junk: Any) -> None:
    good, other = llm.generate(["good", junk], ONE, use_tqdm=False, on_error="return")
    assert good.error is None
    assert answered_or_refused(other)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(messages=MESSAGES | JUNK, thinking=st.booleans())
def test_junk_among_conversations_is_answered_or_refused(llm: LLM, messages: Any, thinking: bool) -> None:
    chats = [[{"role": "user", "content": "good"}], messages]
    good, other = llm.chat(chats, ONE, thinking=thinking, use_tqdm=False, on_error="return")
    assert good.error is None
    assert answered_or_refused(other)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(junk=JUNK)
def test_junk_as_the_whole_input_is_answered_or_refused(llm: LLM, junk: Any) -> None:
    for ask in (llm.generate, llm.chat):
        try:
            outputs = ask(junk, ONE, use_tqdm=False, on_error="return")
        except RequestError:
            continue  # any other exception fails the test
        assert all(answered_or_refused(output) for output in outputs)
