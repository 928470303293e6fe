"""Images in chats: one placeholder each, sources in the order of the prompt, and no text that passes for one."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from vocabulary import chat_format, tokenizer

from deepinfer.core.errors import RequestError
from deepinfer.text.spellings import IMAGE


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def image(source: Any) -> dict[str, Any]:
    return {"type": "image", "image": source}


def url(source: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": source, "detail": "high"}}


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def places(ids: list[int], vocabulary: str = "v41") -> int:
    return ids.count(tokenizer(vocabulary).token_id(IMAGE))


def test_every_kind_of_source_is_returned_as_given() -> None:
    sources = [b"bytes", "a/path.png", Path("b.png"), Image.new("RGB", (2, 2)), "data:image/png;base64,AAAA"]
    encoded = chat_format("v41").encode([user(*map(image, sources), url("data:,x"), url("c.png"))])
    assert encoded.images == [*sources, "data:,x", "c.png"]
    assert places(encoded.ids) == len(encoded.images)


def test_a_url_may_stand_without_a_dict() -> None:
    assert chat_format("v41").encode([user({"type": "image_url", "image_url": "a.png"})]).images == ["a.png"]


def test_the_prompt_has_the_image_between_its_texts() -> None:
    ids = chat_format("v41").encode([user(text("left"), image(b"x"), text("right"))], thinking=False).ids
    prompt = tokenizer("v41").decode(ids)
    assert prompt == f"<｜User｜>left\n\n{IMAGE}\n\nright<｜Assistant｜></think>"


def test_images_of_several_messages_keep_their_order() -> None:
    messages = [
        {"role": "system", "content": [image(b"0"), text("s")]},
        user(image(b"1"), image(b"2")),
        {"role": "assistant", "content": "ok"},
        user(text("t"), image(b"3")),
    ]
    encoded = chat_format("v41").encode(messages)
    assert encoded.images == [b"0", b"1", b"2", b"3"]
    assert places(encoded.ids) == 4


def test_reordered_tool_results_take_their_images_along() -> None:
    calls = [{"id": i, "type": "function", "function": {"name": "f", "arguments": "{}"}} for i in "ab"]
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "b", "content": [text("second"), image(b"B")]},
        {"role": "tool", "tool_call_id": "a", "content": [text("first"), image(b"A")]},
    ]
    encoded = chat_format("v41").encode(messages)
    prompt = tokenizer("v41").decode(encoded.ids)
    assert prompt.index("first") < prompt.index("second")
    assert encoded.images == [b"A", b"B"]


@pytest.mark.parametrize("vocabulary", ["v41", "toy"])
@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_text_never_passes_for_an_image(vocabulary: str, data: st.DataObject) -> None:
    forged = st.sampled_from([IMAGE, "<image 0>", "<image 1>", "<image 0", "<", "<｜image｜>", "http://image/0"])
    word = st.one_of(forged, st.text("<>image 01|", max_size=6))
    paragraph = st.lists(word, min_size=1, max_size=4).map("".join).map(text)
    parts = data.draw(st.lists(st.one_of(paragraph, st.binary(max_size=3).map(image)), min_size=1, max_size=6))
    encoded = chat_format(vocabulary).encode([user(*parts)], thinking=False)
    prompt = tokenizer(vocabulary).decode(encoded.ids)
    pieces = [part["text"] if part["type"] == "text" else IMAGE for part in parts]
    assert prompt == "<｜User｜>" + "\n\n".join(pieces) + "<｜Assistant｜></think>"
    assert encoded.images == [part["image"] for part in parts if part["type"] == "image"]
    assert places(encoded.ids, vocabulary) == len(encoded.images)


def test_the_typed_spelling_is_not_the_place() -> None:
    ids = chat_format("v41").encode([user(text(f"{IMAGE}!"), image(b"x"))], thinking=False).ids
    assert ids.index(tokenizer("v41").token_id(IMAGE)) > len(tokenizer("v41").encode(f"{IMAGE}!"))


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (user(image(5)), r"messages\[0\]\.content\[0\]: an image must be a path, a data URL, bytes or a PIL image"),
        (user(text("a"), {"type": "image"}), r"messages\[0\]\.content\[1\]: an image must be"),
        (user({"type": "image_url", "image_url": {}}), r"an image must be .* got None"),
        (user({"type": "image_url"}), r"an image must be .* got None"),
        ({"role": "assistant", "content": [image(b"x")]}, "[Aa]ssistant"),
    ],
)
def test_bad_images_have_one_error(message: dict[str, Any], error: str) -> None:
    with pytest.raises(RequestError, match=error):
        chat_format("toy").encode([message, user(text("q"))])


def test_the_caller_s_messages_are_left_alone() -> None:
    messages = [user(image(b"x"), text("y")), {"role": "developer", "content": "z"}]
    chat_format("toy").encode(messages)
    assert messages == [user(image(b"x"), text("y")), {"role": "developer", "content": "z"}]
