"""Compressed token ids against stored ones, the released count, and an independent folding of the text."""

import re
import time
import unicodedata
from dataclasses import replace

import pytest
from safetensors.torch import load_file
from vocabulary import GOLDEN, tokenizer

from deepinfer.config.model import ModelConfig
from deepinfer.core.errors import CheckpointError
from deepinfer.text.engram_classes import check_engram_classes, engram_classes


@pytest.fixture(scope="module")
def v41_classes() -> list[int]:
    return engram_classes(tokenizer("v41"))


def test_golden_map() -> None:
    classes = engram_classes(tokenizer("golden"))
    assert classes == load_file(GOLDEN / "engram.safetensors")["token_map"].tolist()
    assert (len(classes), len(set(classes))) == (476, 405)


def test_official_count(v41_classes: list[int]) -> None:
    assert (len(v41_classes), len(set(v41_classes))) == (129280, 99092)


def test_official_vocabulary_takes_seconds() -> None:
    start = time.perf_counter()
    engram_classes(tokenizer("v41"))
    assert time.perf_counter() - start < 10


@pytest.mark.parametrize("name", ["v41", "golden", "toy"])
def test_numbers_follow_first_appearance(name: str) -> None:
    highest = -1
    for number in engram_classes(tokenizer(name)):
        assert number <= highest + 1
        highest = max(highest, number)


def one(text: str, classes: list[int]) -> int:
    (token_id,) = tokenizer("v41").encode(text)
    return classes[token_id]


@pytest.mark.parametrize(
    "group",
    [["the", " the", "The", " The", " THE"], ["e", "é", "E", "É"], ["\n", " ", "\t", "\n\n"], ["1", "¹"]],
    ids=["case and space", "accent", "white space", "compatibility"],
)
def test_tokens_that_differ_only_in_form_share_a_class(group: list[str], v41_classes: list[int]) -> None:
    assert len({one(text, v41_classes) for text in group}) == 1


@pytest.mark.parametrize("pair", [["the", "this"], [" ", "a"], ["1", "2"], ["e", "o"]])
def test_other_tokens_do_not(pair: list[str], v41_classes: list[int]) -> None:
    assert one(pair[0], v41_classes) != one(pair[1], v41_classes)


def test_incomplete_characters_keep_their_own_class(v41_classes: list[int]) -> None:
    first, second = tokenizer("v41").encode("🙂")[0], tokenizer("v41").encode("漢\U0002a6d6")[-1]
    assert "\ufffd" in tokenizer("v41").decode([first]) + tokenizer("v41").decode([second])
    assert v41_classes.count(v41_classes[first]) == 1


def test_control_tokens_are_not_dropped(v41_classes: list[int]) -> None:
    assert len({v41_classes[i] for i in (0, 1, 2, 128799, 128803, 128804, 128821, 128822, 129264)}) == 9


@pytest.mark.parametrize("name", ["golden", "toy", "v41"])
def test_classes_agree_with_an_independent_folding(name: str) -> None:
    vocabulary, numbers = tokenizer(name), {}
    for i, (text, number) in enumerate(zip(vocabulary.token_texts(), engram_classes(vocabulary), strict=True)):
        key = vocabulary.token(i) if "\ufffd" in text else fold(text)
        assert number == numbers.setdefault(key, len(numbers)), (i, text)


def fold(text: str) -> str:
    folded = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    folded = "".join(letter for letter in folded if unicodedata.category(letter)[0] != "M").lower()
    folded = re.sub(r"[ \t\r\n]+", " ", folded)
    return (folded if folded == " " else folded.strip()) or text


class TestCheck:
    config = ModelConfig.from_file(GOLDEN / "checkpoint" / "config.json")

    def test_golden_fits(self) -> None:
        check_engram_classes(engram_classes(tokenizer("golden")), self.config, "here")

    def test_another_tokenizer_is_refused_with_both_counts(self) -> None:
        classes = engram_classes(tokenizer("toy"))
        message = rf"some/dir: the tokenizer has {len(set(classes))} Engram classes but .* is 405"
        with pytest.raises(CheckpointError, match=message):
            check_engram_classes(classes, self.config, "some/dir")

    def test_another_count_is_refused(self) -> None:
        other = replace(self.config, engram_compressed_vocab_size=406)
        with pytest.raises(CheckpointError, match=r"405 Engram classes .* is 406"):
            check_engram_classes(engram_classes(tokenizer("golden")), other, "here")
