"""How the tokens of one request are chosen, and when the request ends."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deepinfer.core.errors import RequestError

SEED_LIMIT = 2**64


@dataclass(frozen=True)
class SamplingParams:
    """Sampling settings of one request; a wrong value raises `RequestError` at construction.

    temperature: 0 takes the most probable token (greedy); a value above 0 divides the logits before the draw.
    max_tokens: most tokens to generate, the stop token included; None: as many as the context has room for.
    stop_token_ids: token ids that end the request, besides the model's end-of-sequence token.
    ignore_eos: go on after the end-of-sequence token (for measurements).
    seq_seed: seed of this sequence's draws, 0 .. 2^64 - 1; None takes a fresh one from the operating system.
        The same seed, prompt and model give the same draws whatever else is in the batch.
    """

    temperature: float = 1.0
    max_tokens: int | None = 256
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    seq_seed: int | None = None

    def __post_init__(self) -> None:
        if not _is_number(self.temperature) or not 0 <= self.temperature < math.inf:
            raise _wrong("temperature", self.temperature, "a finite number >= 0 (0: greedy)")
        if self.max_tokens is not None and not (_is_int(self.max_tokens) and self.max_tokens >= 1):
            raise _wrong("max_tokens", self.max_tokens, "a whole number >= 1, or None for all the context has room for")
        if self.seq_seed is not None and not (_is_int(self.seq_seed) and 0 <= self.seq_seed < SEED_LIMIT):
            raise _wrong("seq_seed", self.seq_seed, "a whole number from 0 to 2^64 - 1, or None for a fresh seed")
        if not isinstance(self.ignore_eos, bool):
            raise _wrong("ignore_eos", self.ignore_eos, "True or False")
        self._freeze_stop_tokens()

    def _freeze_stop_tokens(self) -> None:
        """Keep an own, unchangeable copy, so that the caller's list may change later."""
        ids = self.stop_token_ids
        if isinstance(ids, str | bytes) or not isinstance(ids, Sequence) or not all(map(_is_token, ids)):
            raise _wrong("stop_token_ids", ids, "a list of token ids, each a whole number >= 0")
        object.__setattr__(self, "stop_token_ids", tuple(ids))


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_token(value: Any) -> bool:
    return _is_int(value) and value >= 0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _wrong(name: str, value: object, accepted: str) -> RequestError:
    return RequestError(f"SamplingParams: {name} is {value!r}; it takes {accepted}")
