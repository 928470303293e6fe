"""Text to token ids and back, for any `tokenizer.json`; plain text can never produce a control token."""

from collections.abc import Sequence
from pathlib import Path

import tokenizers
from tokenizers.decoders import DecodeStream

from deepinfer.core.errors import CheckpointError, RequestError

REPLACEMENT = "\ufffd"


class Tokenizer:
    """A vocabulary of ids 0 .. vocab_size - 1, of which some are added (control) tokens.

    `encode` reads all text as plain text: a spelling such as `<｜User｜>` becomes ordinary pieces, so users cannot
    forge control tokens. Where a control token is meant, take its id from `token_id`.
    """

    def __init__(self, json: str, where: str = "tokenizer.json") -> None:
        """Build from the text of a `tokenizer.json`; `where` names it in a CheckpointError."""
        try:
            full = tokenizers.Tokenizer.from_str(json)
        except Exception as error:  # the package raises bare Exception
            raise CheckpointError(f"{where} is not a tokenizer of the `tokenizers` package: {error}") from error
        self.json = json
        self.where = where
        self._full = full
        self._plain = _without_added_vocabulary(full)
        self._added = {token.content: token_id for token_id, token in full.get_added_tokens_decoder().items()}
        self.vocab_size = full.get_vocab_size(with_added_tokens=True)
        self._check()

    @classmethod
    def from_file(cls, path: str | Path) -> "Tokenizer":
        """Read a `tokenizer.json`, or the one inside a checkpoint directory; CheckpointError if it cannot be used."""
        path = Path(path)
        if path.is_dir():
            path = path / "tokenizer.json"
        try:
            json = path.read_text("utf-8")
        except FileNotFoundError as error:
            raise CheckpointError(f"no tokenizer at {path}: expected a tokenizer.json there") from error
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path} cannot be read as UTF-8 text: {error}") from error
        return cls(json, str(path))

    def encode(self, text: str) -> list[int]:
        """Return the ids of plain text; no BOS is put in front and no added token is recognised.

        RequestError if it is not text that UTF-8 can express (a lone surrogate).
        """
        try:
            return self._plain.encode(text, add_special_tokens=False).ids
        except TypeError as error:  # what the package raises for both kinds of bad input
            raise RequestError(f"not encodable text: {text!r:.80}; expected a str without lone surrogates") from error

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Return the text of ids; bytes that are not UTF-8 become U+FFFD. ValueError for an id out of range."""
        self._check_range(ids)
        return self._full.decode(list(ids), skip_special_tokens=skip_special)

    def token_id(self, spelling: str) -> int | None:
        """Return the id of an added token, or None if the vocabulary does not add this spelling."""
        return self._added.get(spelling)

    @property
    def added_ids(self) -> frozenset[int]:
        """The ids of all added tokens."""
        return frozenset(self._added.values())

    def token(self, token_id: int) -> str:
        """Return the raw vocabulary string of an id (byte-level, not text)."""
        self._check_range([token_id])
        return self._full.id_to_token(token_id) or ""

    def token_texts(self) -> list[str]:
        """Return the text of every single id, control tokens kept, in the order of the ids."""
        return self._full.decode_batch([[i] for i in range(self.vocab_size)], skip_special_tokens=False)

    def stream(self, skip_special: bool = True) -> "StreamDecoder":
        """Return a decoder that takes ids one by one."""
        return StreamDecoder(self, self._full, skip_special)

    def _check_range(self, ids: Sequence[int]) -> None:
        for token_id in ids:
            if not 0 <= token_id < self.vocab_size:
                raise ValueError(f"token id {token_id} is outside the vocabulary of {self.vocab_size}")

    def _check(self) -> None:
        largest = max(self._full.get_vocab(with_added_tokens=True).values(), default=-1)
        if largest + 1 != self.vocab_size:
            raise CheckpointError(
                f"{self.where}: {self.vocab_size} tokens but the largest id is {largest}; ids must have no gaps"
            )
        for spelling, token_id in self._added.items():
            if token_id in self.encode(spelling):
                raise CheckpointError(
                    f"{self.where}: the plain text {spelling!r} encodes to the added token {token_id}; "
                    "the model part of the vocabulary must not be able to produce an added token"
                )


class StreamDecoder:
    """Decodes ids as they come; a character split over several ids appears once its last byte has arrived."""

    def __init__(self, owner: Tokenizer, full: tokenizers.Tokenizer, skip_special: bool) -> None:
        self._owner = owner
        self._full = full
        self._skip_special = skip_special
        self._stream = DecodeStream(skip_special_tokens=skip_special)
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        """Return the text that became certain with this id, possibly empty."""
        self._owner._check_range([token_id])
        text = self._stream.step(self._full, token_id)
        if text is None:
            self._pending.append(token_id)
            return ""
        self._pending.clear()
        return text

    def finish(self) -> str:
        """Return what is left: an incomplete character comes out as U+FFFD."""
        text = self._full.decode(self._pending, skip_special_tokens=self._skip_special)
        self._pending.clear()
        return text


def _without_added_vocabulary(full: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Return a tokenizer that shares the model and text pipeline but knows no added token."""
    plain = tokenizers.Tokenizer(full.model)
    if full.normalizer is not None:
        plain.normalizer = full.normalizer
    if full.pre_tokenizer is not None:
        plain.pre_tokenizer = full.pre_tokenizer
    return plain
