"""The corpus as token ids: documents in random order, each as BOS, its text, EOS, in one file of uint16."""

import argparse
import hashlib
import random
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from deepinfer.text.spellings import BOS, EOS
from deepinfer.text.tokenizer import Tokenizer

# 34 MB: what still travels well to another machine.
LARGEST = 17_000_000
Ids = NDArray[np.int32]


def control_id(tokenizer: Tokenizer, spelling: str) -> int:
    """The id of a protocol spelling; ValueError if the vocabulary lacks it."""
    token_id = tokenizer.token_id(spelling)
    if token_id is None:
        raise ValueError(f"{tokenizer.where} has no added token {spelling!r}")
    return token_id


def tokenise(documents: Iterable[str], tokenizer: Tokenizer, largest: int = LARGEST) -> NDArray[np.uint16]:
    """Ids of whole documents, in an order that depends on their texts alone, until `largest` ids are reached."""
    bos, eos = control_id(tokenizer, BOS), control_id(tokenizer, EOS)
    pieces: list[NDArray[np.uint16]] = []
    total = 0
    for document in sorted(documents, key=lambda text: hashlib.blake2b(text.encode(), digest_size=8).digest()):
        ids = [bos, *tokenizer.encode(document), eos]
        if total + len(ids) > largest:
            break
        pieces.append(np.array(ids, np.uint16))
        total += len(ids)
    return np.concatenate(pieces)


class Corpus:
    """Random pieces of a tokenised corpus, read through a memory map."""

    def __init__(self, path: Path, tokenizer: Tokenizer) -> None:
        self._ids = np.memmap(path, np.uint16, mode="r")
        self._tokenizer = tokenizer
        self._bos = control_id(tokenizer, BOS)
        self._starts = np.flatnonzero(self._ids == self._bos)

    def piece(self, rng: random.Random, length: int) -> Ids:
        """`length` ids that begin with BOS: from the start of a document or from anywhere, over documents' ends."""
        at = int(self._starts[rng.randrange(len(self._starts))])
        if rng.random() < 0.5 or at + length > len(self._ids):
            at = rng.randrange(max(1, len(self._ids) - length))
        ids = np.array(self._ids[at : at + length], np.int32)
        ids[0] = self._bos
        return ids

    def passages(self, rng: random.Random, tokens: int) -> list[str]:
        """The texts of a random run of documents of about `tokens` tokens."""
        first = rng.randrange(len(self._starts))
        start = int(self._starts[first])
        last = min(len(self._starts) - 1, int(np.searchsorted(self._starts, start + tokens)))
        bounds = self._starts[first : max(last, first + 1) + 1]
        spans = pairwise(bounds)
        return [self._tokenizer.decode([int(i) for i in self._ids[low:high]]) for low, high in spans]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("train/data"), help="has train.txt, gets corpus.bin")
    parser.add_argument("--tokenizer", type=Path, default=Path("checkpoints/mini"))
    arguments = parser.parse_args()
    documents = (arguments.data / "train.txt").read_text("utf-8").split("\n\f\n")
    ids = tokenise(documents, Tokenizer.from_file(arguments.tokenizer))
    ids.tofile(arguments.data / "corpus.bin")
    print(f"{len(ids)} tokens of {len(documents)} documents")


if __name__ == "__main__":
    main()
