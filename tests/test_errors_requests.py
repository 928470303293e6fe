"""Bad requests: one error each that says what, where and what would do; the others are answered all the same."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from llm_tools import caches_of
from PIL import Image

from deepinfer import LLM, RequestError, SamplingParams

SHORT = SamplingParams(temperature=0, max_tokens=3)
GOOD = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def llm(tiny_checkpoint: Path) -> LLM:
    return LLM(tiny_checkpoint)


def image_chat(image: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "image", "image": image}]}]


BAD_PROMPTS: dict[str, tuple[Any, list[str]]] = {
    "empty text": ("", ["prompt is empty", "at least one character"]),
    "beyond the context": ([5] * 2048, ["2048 tokens", "context of 2048", "at least one new token"]),
    "text beyond the context": ("x" * 2048, ["2049 tokens", "context of 2048"]),
    "beyond the vocabulary": ([5, 267], ["token 1 is 267", "0 to 266"]),
    "negative token": ([5, -1], ["token 1 is -1", "0 to 266"]),
    "not a token": ([5, "a"], ["token 1 is 'a'", "whole numbers"]),
    "half a token": ([5, 0.5], ["token 1 is 0.5", "whole numbers"]),
    "image marker": ([5, 266], ["token 1 is 266", "a prompt with images is"]),
    "lone surrogate": ("\ud800", ["surrogate"]),
}


@pytest.mark.parametrize("case", BAD_PROMPTS)
def test_a_bad_prompt_is_refused_with_its_reason(llm: LLM, case: str) -> None:
    prompt, words = BAD_PROMPTS[case]
    with pytest.raises(RequestError) as caught:
        llm.generate(prompt, SHORT, use_tqdm=False)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("case", BAD_PROMPTS)
def test_a_bad_prompt_does_not_stop_its_neighbours(llm: LLM, case: str) -> None:
    prompt, words = BAD_PROMPTS[case]
    outputs = llm.generate(["one", prompt, "two"], SHORT, use_tqdm=False, on_error="return")
    assert [output.index for output in outputs] == [0, 1, 2]
    assert outputs[1].finish_reason == "error"
    assert outputs[1].token_ids == ()
    assert all(word in str(outputs[1].error) for word in words)
    for output, alone in ((outputs[0], "one"), (outputs[2], "two")):
        assert output.error is None
        assert output.token_ids == llm.generate(alone, SHORT, use_tqdm=False)[0].token_ids


def test_an_empty_token_list_in_a_batch_is_named(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"1 of 2 prompts cannot be served.*prompt 1: the prompt is empty"):
        llm.generate([[5], []], SHORT, use_tqdm=False)


def test_all_bad_prompts_are_listed_before_anything_runs(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RequestError) as caught:
        llm.generate(["fine", "", [999]], SHORT)
    message = str(caught.value)
    assert "2 of 3 prompts cannot be served, none was run" in message
    assert "prompt 1: the prompt is empty" in message
    assert "prompt 2: token 0 is 999" in message
    assert capsys.readouterr().err == ""  # no progress bar: nothing was started


def unreadable(tmp_path: Path) -> Path:
    path = tmp_path / "broken.png"
    path.write_bytes(b"\x89PNG\r\n\x1a\nnonsense")
    return path


BAD_CHATS: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "unreadable image": (lambda tmp: image_chat(unreadable(tmp)), ["image 0", "broken.png", "not a readable image"]),
    "absent image": (lambda tmp: image_chat(tmp / "absent.png"), ["image 0", "absent.png", "cannot be read"]),
    "image from the network": (lambda tmp: image_chat("https://host/x.png"), ["https://host/x.png", "not fetched"]),
    "image without pixels": (lambda tmp: image_chat(Image.new("RGB", (0, 5))), ["image 0", "0 x 5 pixels"]),
    "unknown role": (lambda tmp: [{"role": "wizard", "content": "hi"}], ["wizard"]),
    "wrong content": (lambda tmp: [{"role": "user", "content": 5}], ["content"]),
    "beyond the context": (lambda tmp: [{"role": "user", "content": "x" * 3000}], ["tokens", "context of 2048"]),
}


@pytest.mark.parametrize("case", BAD_CHATS)
def test_a_bad_conversation_is_refused_and_its_neighbour_answered(llm: LLM, tmp_path: Path, case: str) -> None:
    make, words = BAD_CHATS[case]
    with pytest.raises(RequestError) as caught:
        llm.chat(make(tmp_path), SHORT, use_tqdm=False)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    bad, good = llm.chat([make(tmp_path), GOOD], SHORT, use_tqdm=False, on_error="return")
    assert str(bad.error) == str(caught.value)
    assert good.error is None
    assert len(good.token_ids) > 0


@pytest.mark.parametrize("messages", [5, "hi", None], ids=repr)
def test_messages_of_a_wrong_type_say_what_is_taken(llm: LLM, messages: Any) -> None:
    with pytest.raises(RequestError, match="messages takes a list of messages"):
        llm.chat(messages, SHORT, use_tqdm=False)


@pytest.mark.parametrize("prompts", [5, None, {1, 2}, b"bytes"], ids=repr)
def test_prompts_of_a_wrong_type_say_what_is_taken(llm: LLM, prompts: Any) -> None:
    with pytest.raises(RequestError, match="prompts takes text, a list of token ids"):
        llm.generate(prompts, SHORT, use_tqdm=False)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ([SHORT], "1 entries for 2 prompts"),
        ({"temperature": 0}, "takes SamplingParams"),
        ([1, 2], "takes SamplingParams"),
    ],
    ids=["too few", "a dict", "numbers"],
)
def test_sampling_params_that_do_not_fit_the_prompts(llm: LLM, params: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        llm.generate(["a", "b"], params, use_tqdm=False)


def test_an_unknown_way_to_treat_errors(llm: LLM) -> None:
    with pytest.raises(RequestError, match="on_error is 'ignore'; it takes 'raise' or 'return'"):
        llm.generate("a", SHORT, on_error="ignore")  # type: ignore[arg-type]


def test_a_prompt_beyond_the_caches_is_refused_and_its_neighbour_answered(tiny_checkpoint: Path) -> None:
    llm = LLM(tiny_checkpoint, max_num_seqs=1, cache_bytes=caches_of(tiny_checkpoint, 5, 1))
    with pytest.raises(RequestError, match=r"the prompt has 1000 tokens; the caches hold 320; set cache_bytes higher"):
        llm.generate([5] * 1000, SHORT, use_tqdm=False)
    bad, good = llm.generate([[5] * 1000, [5] * 10], SHORT, use_tqdm=False, on_error="return")
    assert (bad.finish_reason, isinstance(bad.error, RequestError)) == ("error", True)
    assert good.error is None
