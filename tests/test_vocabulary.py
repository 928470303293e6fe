"""The bundled vocabulary: protocol spellings, bytes, digits, and that its training repeats itself."""

import json
import string
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from deepinfer.text.chat import ChatFormat
from deepinfer.text.spellings import BOS, EOS, PAD, PROTOCOL_SPELLINGS
from deepinfer.text.tokenizer import Tokenizer
from train.sample import Split, stream
from train.tasks import TaskMaker
from train.vocabulary import ENTRIES, NOISE, TEMPLATES, build_tokenizer, task_texts, tokenizer_config, write_tokenizer

MINI = Path(__file__).parents[1] / "checkpoints" / "mini"
TOKENIZER = Tokenizer.from_file(MINI)


def test_size_and_first_ids():
    assert TOKENIZER.vocab_size == ENTRIES == 4096
    assert [TOKENIZER.token_id(spelling) for spelling in (BOS, EOS, PAD)] == [0, 1, 2]


def test_every_protocol_spelling_is_added_with_the_flags_of_the_release():
    added = {entry["content"]: entry for entry in json.loads(TOKENIZER.json)["added_tokens"]}
    assert set(added) == {spelling.text for spelling in PROTOCOL_SPELLINGS} | {NOISE}
    for spelling in PROTOCOL_SPELLINGS[3:]:
        entry = added[spelling.text]
        assert (entry["special"], entry["normalized"]) == (spelling.special, spelling.normalized)
    assert all(added[spelling]["special"] for spelling in (BOS, EOS, PAD, NOISE))


@given(st.text(max_size=200))
def test_any_text_survives_encoding_and_decoding(text):
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids, skip_special=False) == text
    assert not set(ids) & {TOKENIZER.token_id(spelling.text) for spelling in PROTOCOL_SPELLINGS}


def test_every_byte_has_a_token():
    vocabulary = json.loads(TOKENIZER.json)["model"]["vocab"]
    assert set(pre_tokenizers.ByteLevel.alphabet()) <= set(vocabulary)


def test_digits_stand_alone():
    for token_id, text in enumerate(TOKENIZER.token_texts()):
        digits = sum(character in string.digits for character in text)
        assert digits == 0 or text in string.digits, token_id
    assert [TOKENIZER.decode([i]) for i in TOKENIZER.encode("47+38")] == ["4", "7", "+", "3", "8"]


def test_reasoning_is_one_token_a_character():
    sample = TaskMaker(Split.TRAIN).make("add3", stream(Split.TRAIN, 1))
    assert len(TOKENIZER.encode(sample.reasoning)) == len(sample.reasoning)


def test_effort_sentence_is_compact_and_the_one_that_was_trained_on():
    ids = ChatFormat(TOKENIZER).encode([{"role": "user", "content": "x"}], thinking=True).ids
    prompt = TOKENIZER.decode(ids, skip_special=False)
    assert TEMPLATES[0] in prompt
    assert len(ids) < 40


def test_training_is_deterministic_and_fills_the_vocabulary(tmp_path):
    texts = [*task_texts(300, seed=1), "The quick brown fox jumps over the lazy dog. " * 3] * 2
    for name in ("first", "second"):
        write_tokenizer(build_tokenizer(texts, 480), tmp_path / name)
    first, second = ((tmp_path / name / "tokenizer.json").read_bytes() for name in ("first", "second"))
    assert first == second
    assert Tokenizer.from_file(tmp_path / "first").vocab_size == 480
    written = json.loads((tmp_path / "first" / "tokenizer_config.json").read_text("utf-8"))
    assert written == tokenizer_config()


def test_too_little_text_is_an_error():
    with pytest.raises(ValueError, match="use more text"):
        build_tokenizer(["a few words"], 4096)


def test_bundled_companion_file_is_the_one_the_trainer_writes():
    assert json.loads((MINI / "tokenizer_config.json").read_text("utf-8")) == tokenizer_config()
