"""Sequences of different lengths as one right-padded batch of device tensors."""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deepinfer.core.errors import ConfigError
from deepinfer.core.request import TEXT
from deepinfer.engine.sequence import Sequence

if TYPE_CHECKING:
    from deepinfer.text.images import ImageInput


@dataclass(frozen=True)
class Batch:
    """One step's input.

    ids: int64 [rows, length], padded on the right (attention is causal, so no token sees the padding).
    types: int8 [rows, length], -1 for text and padding.
    images: the images of all rows in row order.
    replay_start: int64 [rows], first position of the decoder half.
    last: int64 [rows], position of each row's newest token, whose logits choose the next.
    """

    ids: Tensor
    types: Tensor
    images: tuple["ImageInput", ...]
    replay_start: Tensor
    last: Tensor


def pack(sequences: Seq[Sequence], pad_token: int, device: torch.device) -> Batch:
    """Build the batch of `sequences` (at least one) on `device`."""
    length = max(sequence.length for sequence in sequences)
    ids = torch.full((len(sequences), length), pad_token, dtype=torch.int64)
    types = torch.full((len(sequences), length), TEXT, dtype=torch.int8)
    for row, sequence in enumerate(sequences):
        tokens = (*sequence.request.token_ids, *sequence.generated)
        ids[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
        prompt_types = sequence.request.token_types
        types[row, : len(prompt_types)] = torch.tensor(prompt_types, dtype=torch.int8)
    images = tuple(image for sequence in sequences for image in sequence.request.images)
    starts = torch.tensor([sequence.replay_start for sequence in sequences], dtype=torch.int64)
    last = torch.tensor([sequence.length - 1 for sequence in sequences], dtype=torch.int64)
    return Batch(ids.to(device), types.to(device), images, starts.to(device), last.to(device))


@dataclass(frozen=True)
class BatchLimits:
    """What one step may hold.

    rows: most sequences. tokens: most positions, padding included; a longer sequence runs alone.
    """

    rows: int = 32
    tokens: int = 16_384

    def __post_init__(self) -> None:
        if self.rows < 1 or self.tokens < 1:
            raise ConfigError(f"a step needs room for at least one sequence and one position, not {self}")

    def alone(self) -> "BatchLimits":
        """Return limits under which every sequence runs by itself, so that no neighbour can change its rounding."""
        return replace(self, rows=1)


def choose(unfinished: Iterable[Sequence], limits: BatchLimits) -> list[Sequence]:
    """Pick the sequences of the next step, oldest first, passing over those that no longer fit."""
    chosen: list[Sequence] = []
    longest = 0
    for sequence in unfinished:
        padded = max(longest, sequence.length)
        if chosen and (len(chosen) + 1) * padded > limits.tokens:
            continue
        chosen.append(sequence)
        longest = padded
        if len(chosen) == limits.rows:
            break
    return chosen
