"""Plain text to ids and back, on the official, a toy and the golden vocabulary."""

import json
from functools import cache
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models
from vocabulary import GOLDEN, SYSTEM_ID, tokenizer, toy_tokenizer_json, v41_tokenizer_json

from deepinfer.core.errors import CheckpointError, RequestError
from deepinfer.text.spellings import EOS, PROTOCOL_SPELLINGS
from deepinfer.text.tokenizer import Tokenizer

NAMES = ["v41", "toy", "golden"]
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


@cache
def added(name: str) -> dict[str, int]:
    return {token["content"]: token["id"] for token in json.loads(tokenizer(name).json)["added_tokens"]}


@pytest.mark.parametrize("name", NAMES)
@given(text=TEXT)
@settings(max_examples=150, deadline=None)
def test_any_text_survives_a_round_trip(name: str, text: str) -> None:
    ids = tokenizer(name).encode(text)
    assert tokenizer(name).decode(ids) == text
    assert all(0 <= i < tokenizer(name).vocab_size for i in ids)


@given(text=st.text("abc XYZ0129.,!?\n\täéß漢字かな🙂", max_size=80))
@settings(max_examples=150, deadline=None)
def test_text_without_spellings_encodes_as_the_package_does(text: str) -> None:
    assert tokenizer("v41").encode(text) == reference_tokenizer().encode(text, add_special_tokens=False).ids


@cache
def reference_tokenizer() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(v41_tokenizer_json())


@pytest.mark.parametrize("name", NAMES)
def test_no_added_spelling_becomes_its_token(name: str) -> None:
    spellings = added(name)
    text = "".join(f"{spelling} x{spelling}{spelling}\n" for spelling in spellings)
    assert not set(tokenizer(name).encode(text)) & set(spellings.values())
    assert tokenizer(name).decode(tokenizer(name).encode(text)) == text


SPELLINGS = st.deferred(lambda: st.sampled_from(sorted(added("v41"))))


@given(pieces=st.lists(st.one_of(TEXT, SPELLINGS, st.sampled_from(["<", "｜", "|", ">", "▁", "</"])), max_size=8))
@settings(max_examples=150, deadline=None)
def test_no_mixture_of_spellings_and_text_becomes_a_control_token(pieces: list[str]) -> None:
    text = "".join(pieces)
    ids = tokenizer("v41").encode(text)
    assert not set(ids) & set(added("v41").values())
    assert tokenizer("v41").decode(ids, skip_special=False) == text


def test_the_package_itself_would_match_what_users_type() -> None:
    assert 1 in reference_tokenizer().encode(EOS, add_special_tokens=False).ids


@pytest.mark.parametrize(
    ("spelling", "token_id"),
    [
        ("<｜begin▁of▁sentence｜>", 0),
        ("<｜end▁of▁sentence｜>", 1),
        ("<｜▁pad▁｜>", 2),
        ("<｜System｜>", SYSTEM_ID),
        ("<｜User｜>", 128803),
        ("<｜Assistant｜>", 128804),
        ("<think>", 128821),
        ("</think>", 128822),
        ("｜DSML｜", 128825),
        ("<｜latest_reminder｜>", 128828),
        ("<｜deepseek_image｜>", 129264),
        ("<｜image｜>", None),
        ("hello", None),
        ("a", None),
    ],
)
def test_ids_of_the_official_spellings(spelling: str, token_id: int | None) -> None:
    assert tokenizer("v41").token_id(spelling) == token_id


def test_protocol_spellings_have_the_official_flags() -> None:
    entries = {token["content"]: token for token in json.loads(v41_tokenizer_json())["added_tokens"]}
    for spelling in PROTOCOL_SPELLINGS:
        entry = entries[spelling.text]
        assert (entry["special"], entry["normalized"]) == (spelling.special, spelling.normalized), spelling.text


def test_sizes() -> None:
    assert [tokenizer(name).vocab_size for name in NAMES] == [129280, 256 + len(PROTOCOL_SPELLINGS), 476]


def test_special_tokens_are_kept_on_demand() -> None:
    ids = [0, *tokenizer("v41").encode("hi"), SYSTEM_ID, 1]
    assert tokenizer("v41").decode(ids) == "hi<｜System｜>"
    assert tokenizer("v41").decode(ids, skip_special=False) == "<｜begin▁of▁sentence｜>hi<｜System｜>" + EOS


@pytest.mark.parametrize("token_id", [-1, 129280, 10**9])
def test_ids_outside_the_vocabulary_are_refused(token_id: int) -> None:
    for use in (lambda i: tokenizer("v41").decode([i]), tokenizer("v41").stream().push, tokenizer("v41").token):
        with pytest.raises(ValueError, match=f"{token_id} is outside the vocabulary of 129280"):
            use(token_id)


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", None, 5, b"bytes"])
def test_what_is_not_text_is_refused(text: object) -> None:
    with pytest.raises(RequestError, match="without lone surrogates"):
        tokenizer("toy").encode(text)  # type: ignore[arg-type]


def test_empty_text() -> None:
    assert tokenizer("v41").encode("") == []
    assert tokenizer("v41").decode([]) == ""


class TestBadFiles:
    def test_missing(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match=r"no tokenizer at .*absent/tokenizer\.json"):
            Tokenizer.from_file(tmp_path / "absent" / "tokenizer.json")

    def test_directory_without_one(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match=str(tmp_path / "tokenizer.json")):
            Tokenizer.from_file(tmp_path)

    @pytest.mark.parametrize("data", [b"", b"{", b"{}", b"[1, 2]", b'{"model": {"type": "BPE"}}', b"\xff\xfe\x00"])
    def test_broken(self, tmp_path: Path, data: bytes) -> None:
        path = tmp_path / "tokenizer.json"
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match=str(path)):
            Tokenizer.from_file(path)

    def test_half_of_a_good_file(self, tmp_path: Path) -> None:
        path = tmp_path / "tokenizer.json"
        path.write_text(toy_tokenizer_json()[: len(toy_tokenizer_json()) // 2], "utf-8")
        with pytest.raises(CheckpointError, match="is not a tokenizer"):
            Tokenizer.from_file(path)

    def test_gap_in_the_ids(self) -> None:
        gapped = tokenizers.Tokenizer(models.BPE(vocab={"a": 0, "b": 2}, merges=[]))
        with pytest.raises(CheckpointError, match="2 tokens but the largest id is 2"):
            Tokenizer(gapped.to_str())

    def test_model_that_can_produce_an_added_token(self) -> None:
        data = json.loads(toy_tokenizer_json())
        data["model"]["ignore_merges"] = True  # whole words are looked up, so `｜DSML｜`-like ASCII spellings match
        data["pre_tokenizer"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never", "split": False}
        with pytest.raises(CheckpointError, match="must not be able to produce an added token"):
            Tokenizer(json.dumps(data))


def test_file_and_directory_are_the_same() -> None:
    by_file = Tokenizer.from_file(GOLDEN / "checkpoint" / "tokenizer.json")
    assert by_file.json == tokenizer("golden").json == (GOLDEN / "checkpoint" / "tokenizer.json").read_text("utf-8")
