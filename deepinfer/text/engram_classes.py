"""Compressed token ids of the Engram hash: tokens whose text differs only in case, accents or spacing share one."""

from collections.abc import Sequence

from tokenizers import Regex
from tokenizers.normalizers import NFD, NFKC, Lowercase, Replace, Strip, StripAccents
from tokenizers.normalizers import Sequence as Chain

from deepinfer.config.model import ModelConfig
from deepinfer.core.errors import CheckpointError
from deepinfer.text.tokenizer import REPLACEMENT, Tokenizer

_FOLD = Chain([NFKC(), NFD(), StripAccents(), Lowercase(), Replace(Regex(r"[ \t\r\n]+"), " ")])
_STRIP = Strip()


def engram_classes(tokenizer: Tokenizer) -> list[int]:
    """Return the compressed id of every token id, numbered in order of first appearance; length `vocab_size`.

    The key of a token is its folded text (NFKC, NFD, accents stripped, lower case, white space collapsed and
    stripped), or its raw vocabulary string where its bytes are not a whole text.
    """
    numbers: dict[str, int] = {}
    keys = (_key(text, tokenizer, token_id) for token_id, text in enumerate(tokenizer.token_texts()))
    return [numbers.setdefault(key, len(numbers)) for key in keys]


def check_engram_classes(classes: Sequence[int], config: ModelConfig, where: str) -> None:
    """Raise CheckpointError unless the number of classes is the one the checkpoint's hashes were made with."""
    found, wanted = len(set(classes)), config.engram_compressed_vocab_size
    if found != wanted:
        raise CheckpointError(
            f"{where}: the tokenizer has {found} Engram classes but engram_compressed_vocab_size is {wanted}; "
            "every Engram hash depends on this number, so use the tokenizer.json the checkpoint was trained with"
        )


def _key(text: str, tokenizer: Tokenizer, token_id: int) -> str:
    if REPLACEMENT in text:
        return tokenizer.token(token_id)
    folded = _FOLD.normalize_str(text)
    if folded != " ":
        folded = _STRIP.normalize_str(folded)
    return folded or text
