"""The generation loop: choose a batch, run the model, sample, until every sequence has ended."""

from collections.abc import Callable
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from deepinfer.engine.batch import Batch, BatchLimits, choose, pack
from deepinfer.engine.sequence import Sequence
from deepinfer.sampling.sampler import Draw, sample

Runner = Callable[[Batch], Tensor]
"""Maps a batch to the logits [rows, vocab] of each row's next token."""


def run_to_end(
    sequences: Seq[Sequence],
    runner: Runner,
    pad_token: int,
    device: torch.device,
    limits: BatchLimits,
    on_step: Callable[[list[Sequence]], None],
) -> None:
    """Generate until every sequence has ended; `on_step` is told which sequences got a token, after each step.

    Nothing is cached: a step reads its sequences from the first token on. So its batch may be chosen anew each time,
    a finished sequence leaves at once and a waiting one takes its place.
    """
    unfinished = [sequence for sequence in sequences if sequence.finish_reason is None]
    while unfinished:
        rows = choose(unfinished, limits)
        logits = runner(pack(rows, pad_token, device))
        for sequence, token in zip(rows, sample(logits, [_draw(row) for row in rows]), strict=True):
            sequence.append(token)
        on_step(rows)
        unfinished = [sequence for sequence in unfinished if sequence.finish_reason is None]


def _draw(sequence: Sequence) -> Draw:
    request = sequence.request
    return Draw(request.params.temperature, request.seed, sequence.length)
