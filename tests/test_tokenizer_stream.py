"""Decoding ids one by one gives the same text as decoding them together, and never half a character."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vocabulary import tokenizer

from deepinfer.text.spellings import EOS

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


@pytest.mark.parametrize("name", ["v41", "toy", "golden"])
@given(text=TEXT)
@settings(max_examples=100, deadline=None)
def test_pieces_of_a_text_join_to_it(name: str, text: str) -> None:
    stream = tokenizer(name).stream()
    pieces = [stream.push(token_id) for token_id in tokenizer(name).encode(text)]
    assert "".join(pieces) + stream.finish() == text


@pytest.mark.parametrize("name", ["v41", "toy"])
@pytest.mark.parametrize("skip_special", [True, False])
@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_any_ids_join_to_their_decoding(name: str, skip_special: bool, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer(name).vocab_size - 1), max_size=12))
    stream = tokenizer(name).stream(skip_special)
    assert "".join(map(stream.push, ids)) + stream.finish() == tokenizer(name).decode(ids, skip_special)


def test_a_character_appears_with_its_last_byte() -> None:
    stream = tokenizer("toy").stream()
    pieces = [stream.push(token_id) for token_id in tokenizer("toy").encode("aé漢🙂")]
    assert pieces == ["a", "", "é", "", "", "漢", "", "", "", "🙂"]
    assert stream.finish() == ""


def test_a_cut_character_comes_out_as_a_replacement() -> None:
    stream = tokenizer("toy").stream()
    ids = tokenizer("toy").encode("x🙂")[:-1]
    assert "".join(map(stream.push, ids)) == "x"
    assert stream.finish() == tokenizer("toy").decode(ids)[1:]
    assert stream.finish() == ""


def test_special_tokens() -> None:
    assert tokenizer("v41").stream().push(1) == ""
    assert tokenizer("v41").stream(skip_special=False).push(1) == EOS


def test_two_streams_do_not_mix() -> None:
    first, second = tokenizer("toy").stream(), tokenizer("toy").stream()
    head, tail = tokenizer("toy").encode("é")
    assert first.push(head) == ""
    assert second.push(tokenizer("toy").encode("b")[0]) == "b"
    assert first.push(tail) == "é"
