"""How well a model predicts English: bits per byte of held-out text."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tqdm import tqdm

from eval.target import Target

PIECE = 1024


@dataclass(frozen=True)
class TextScore:
    """Information content of a text in bits, under a model, and the text's size in tokens and in bytes of UTF-8."""

    bits: float
    tokens: int
    bytes: int

    @property
    def bits_per_byte(self) -> float:
        """Comparable between vocabularies."""
        return self.bits / self.bytes

    @property
    def perplexity(self) -> float:
        """Per token; depends on the vocabulary."""
        return 2 ** (self.bits / self.tokens)


@torch.inference_mode()
def score_text(target: Target, documents: Sequence[str], piece: int = PIECE, shown: bool = True) -> TextScore:
    """Score whole documents.

    A document is cut into pieces of `piece` - 1 tokens, each read after a beginning-of-sequence token and nothing
    else: so every token of the text is predicted exactly once, the first of a piece without any context. Beginning
    and end tokens are not predicted, so the bytes counted are exactly those of the documents. The decoder half runs
    over all tokens (no replay).
    """
    ids = [target.tokenizer.encode(document) for document in documents]
    pieces = [found[at : at + piece - 1] for found in ids for at in range(0, len(found), piece - 1)]
    bits = 0.0
    for tokens in tqdm(pieces, desc="English text", disable=not shown):
        row = torch.tensor([[target.config.bos_token_id, *tokens]], device=target.device)
        logits = target.model(row).logits[0, :-1]
        bits += float(torch.nn.functional.cross_entropy(logits, row[0, 1:], reduction="sum").double()) / math.log(2)
    return TextScore(bits, sum(map(len, pieces)), sum(len(document.encode()) for document in documents))
