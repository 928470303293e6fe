"""The model's vocabulary as xgrammar takes it: text tokens with their bytes, added tokens without any."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deepinfer.core.errors import RequestError
from deepinfer.text.spellings import DSML, END_THINK
from deepinfer.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from xgrammar import TokenizerInfo

_NO_TEXT = "ÿÿ"
"""Bytes FF FF in byte-level spelling: no text has them, so only a rule that names the token lets it come."""


class Vocabulary:
    """Ids 0 .. `size` - 1, the model's; those behind the tokenizer's are as forbidden as added tokens."""

    def __init__(self, tokenizer: Tokenizer, size: int, eos: int) -> None:
        self.size, self.eos = size, eos
        self.markup, self.end_thinking = tokenizer.token_id(DSML), tokenizer.token_id(END_THINK)
        self._tokenizer = tokenizer

    @property
    def words(self) -> int:
        """Words of 32 bits of a mask."""
        return -(-self.size // 32)

    def thinking(self) -> Tensor:
        """int32 [words]: what may come while the model thinks: text, and the token that ends it."""
        allowed = torch.zeros(self.words * 32, dtype=torch.bool)
        allowed[: self._tokenizer.vocab_size] = True
        allowed[list(self._tokenizer.added_ids)] = False
        if self.end_thinking is not None:
            allowed[self.end_thinking] = True
        return pack(allowed)

    def known(self, markup: bool) -> Tensor:
        """int32 [words]: what grammars may take: text, the end, and with `markup` the DSML token."""
        allowed = torch.zeros(self.words * 32, dtype=torch.bool)
        allowed[: self._tokenizer.vocab_size] = True
        allowed[list(self._tokenizer.added_ids)] = False
        allowed[self.eos] = True
        if markup and self.markup is not None:
            allowed[self.markup] = True
        return pack(allowed)

    def info(self, markup: bool) -> "TokenizerInfo":
        """What xgrammar knows of it; with `markup`, grammars may name the DSML token."""
        import xgrammar

        added = self._tokenizer.added_ids
        spelled = [
            "" if token in added else self._tokenizer.token(token) for token in range(self._tokenizer.vocab_size)
        ]
        if not set("".join(spelled)) <= _byte_characters():
            raise RequestError(f"{self._tokenizer.where} is not byte-level; structured output takes one that is")
        spelled += [""] * (self.size - len(spelled))
        if markup and self.markup is not None:
            spelled[self.markup] = _NO_TEXT
        kind = xgrammar.VocabType.BYTE_LEVEL
        return xgrammar.TokenizerInfo(spelled, kind, vocab_size=self.size, stop_token_ids=[self.eos])


def pack(allowed: Tensor) -> Tensor:
    """bool [..., 32 * words] as int32 [..., words], bit t % 32 of word t // 32 for token t."""
    bits = allowed.view(*allowed.shape[:-1], -1, 32).to(torch.int64) << torch.arange(32)
    words: Tensor = bits.sum(-1)
    return words.to(torch.int32)


def _byte_characters() -> set[str]:
    """The 256 characters by which byte-level vocabularies spell bytes: printable Latin-1, the others moved behind."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return {chr(code) for code in printable} | {chr(0x100 + place) for place in range(256 - len(printable))}
