"""What greedy speculative decoding would have done for a finished sequence, round by round, without decoding again.

Verification accepts a draft only where it is the target's own choice. So a greedily decoded sequence is the same with
and without drafts; only the rounds in which it is made differ, and they follow from one forward pass of the target
(for the features) and one drafted block for each position at which a round could begin.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.reference.model import ForwardOutput, ReferenceModel
from deepinfer.text.images import ImageInput

ANCHORS_AT_ONCE = 256


@dataclass(frozen=True)
class Round:
    """One round: a block of G drafts after the newest accepted token, and the target's verdict.

    position: of the anchor, the newest accepted token.
    accepted: drafts accepted, 0 .. judged.
    judged: drafts that fall inside the sequence, 1 .. G; of later ones nothing is known.
    emitted: tokens that the round adds: the accepted drafts and the bonus token, unless the sequence ends before it.
    confidence: the G confidence logits, before any calibration.
    """

    position: int
    accepted: int
    judged: int
    emitted: int
    confidence: tuple[float, ...]


@torch.inference_mode()
def greedy_rounds(
    model: ReferenceModel,
    ids: Tensor,
    prompt_length: int,
    replay_start: int | None = None,
    types: Tensor | None = None,
    images: Sequence[ImageInput] = (),
) -> list[Round]:
    """Rounds that make the reply of one sequence.

    ``ids`` int64 [T]: a prompt of ``prompt_length`` tokens and the reply that greedy decoding gave, its end token
    included if there was one; ``types`` int8 [T] and ``images`` as for `ReferenceModel.forward`. ``replay_start`` is
    the position from which the decoder half runs, None where it runs over everything.
    """
    start = None if replay_start is None else torch.tensor([replay_start], device=ids.device)
    rows = None if types is None else types[None]
    output = model(ids[None], rows, images, start, compact=start is not None)
    return rounds_of(model, ids, output, prompt_length)


@torch.inference_mode()
def rounds_of(model: ReferenceModel, ids: Tensor, output: ForwardOutput, prompt_length: int) -> list[Round]:
    """As `greedy_rounds`, from the target's ``output`` for ``ids`` (as the only row of a batch)."""
    if prompt_length >= len(ids) - 1:  # the prompt's own pass gives the first token of a reply
        return []
    anchors = torch.arange(prompt_length, len(ids) - 1, device=ids.device)
    groups = torch.split(anchors, ANCHORS_AT_ONCE)
    blocks = [model.draft(ids, output.features[0], some, output.first) for some in groups]
    tokens: list[list[int]] = torch.cat([block.tokens for block in blocks]).tolist()
    confidence: list[list[float]] = torch.cat([block.confidence for block in blocks]).tolist()
    return walk(ids.tolist(), prompt_length, tokens, confidence)


def walk(
    ids: Sequence[int], prompt_length: int, drafts: Sequence[Sequence[int]], confidence: Sequence[Sequence[float]]
) -> list[Round]:
    """Go from anchor to anchor through a sequence.

    ``drafts`` and ``confidence`` hold one block for every position from ``prompt_length`` (the reply's first token,
    which the prompt's own forward pass gives and which is the first anchor) to the last but one of ``ids``.
    """
    rounds: list[Round] = []
    position, last = prompt_length, len(ids) - 1
    while position < last:
        block = drafts[position - prompt_length]
        judged = min(len(block), last - position)
        accepted = _common_prefix(block[:judged], ids[position + 1 :])
        emitted = min(accepted + 1, last - position)
        rounds.append(Round(position, accepted, judged, emitted, tuple(confidence[position - prompt_length])))
        position += emitted
    return rounds


def mean_accepted_length(rounds: Sequence[Round]) -> float:
    """Tokens a round emits on average, the bonus token included; ValueError without rounds."""
    if not rounds:
        raise ValueError("no rounds were made; a mean needs at least one")
    return sum(round_.emitted for round_ in rounds) / len(rounds)


def _common_prefix(block: Sequence[int], following: Sequence[int]) -> int:
    """How many leading tokens of ``block`` are those that follow in the sequence."""
    length = 0
    for draft, token in zip(block, following, strict=False):
        if draft != token:
            break
        length += 1
    return length
