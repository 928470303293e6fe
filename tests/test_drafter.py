"""The drafter over caches gives the reference's blocks: golden values, chunks, neighbours, starts, full caches."""

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from model_rig import Player, Rig, make_smooth, rig_of, text
from safetensors.torch import load_file
from test_model_golden import rig_at
from torch import Tensor

from deepinfer.model.drafter import Drafter
from deepinfer.speculative.drafting import draft

DRAFTING = ["all parts", "no Engram", "one draft stage", "hidden 96", "ratio 1 only"]


def drafter_of(rig: Rig) -> Drafter:
    assert rig.drafter is not None
    return rig.drafter


class Made(NamedTuple):
    """A greedy block: tokens [A, G], logits [A, G, vocab], confidence [A, G]."""

    tokens: Tensor
    logits: Tensor
    confidence: Tensor


@torch.inference_mode()
def drafted(player: Player, ids: dict[int, int]) -> Made:
    assert player.drafter is not None
    logits: list[Tensor] = []

    def best(row: Tensor, place: int) -> Tensor:
        logits.append(row)
        return row.argmax(-1)

    made = draft(player.drafter, player.anchors(ids), player.caches, best)
    return Made(made.tokens, torch.stack(logits, 1), made.confidence)


def relative(made: Tensor, wanted: Tensor) -> float:
    return ((made - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max().item()


@pytest.mark.parametrize("chunk", [1, 7, 80])
@pytest.mark.parametrize("stored", [True, False], ids=["stored features", "own features"])
def test_golden_drafts_through_the_engine(golden_checkpoint: Path, golden: Path, chunk: int, stored: bool) -> None:
    """All prompts lie in one batch. The engine's own features may differ by a value on a rounding tie."""
    rig = rig_at(golden_checkpoint)
    texts, held = load_file(golden / "text_fp32.safetensors"), load_file(golden / "dspark_fp32.safetensors")
    names = sorted({name.split(".")[0] for name in held})
    player = Player(rig.model, slots=len(names), drafter=drafter_of(rig))
    ids = {player.add(texts[f"{name}.ids"].tolist()[:-1]): int(texts[f"{name}.ids"][-1]) for name in names}
    while left := {n: len(one.ids) - one.done for n, one in player.requests.items() if one.done < len(one.ids)}:
        features = [texts[f"{name}.features"] for name in names] if stored else None
        player.step({number: min(chunk, rows) for number, rows in left.items()}, features)
    block, same = drafted(player, ids), 0
    for row, name in enumerate(names):
        agree = block.tokens[row] == held[f"{name}.tokens"]
        same += int(agree.sum())
        if stored:
            assert agree.all()
            assert relative(block.logits[row], held[f"{name}.logits"]) < 1e-3
            assert relative(block.confidence[row], held[f"{name}.confidence_logits"]) < 1e-3
    assert same >= 0.8 * block.tokens.numel()


def expected(rig: Rig, ids: list[int], anchor: int, first: int) -> Made:
    """The reference's block; it sees no features before `first`."""
    every = torch.tensor([*ids, anchor])
    with torch.inference_mode():
        start = None if first == 0 else torch.tensor([first])
        output = rig.reference(every[None], replay_start=start, compact=first > 0)
        block = rig.reference.draft(every, output.features[0], torch.tensor([len(ids)]), output.first)
    return Made(block.tokens, block.logits, block.confidence)


def check(rig: Rig, player: Player, number: int, anchor: int, made: Made, row: int = 0) -> None:
    playing = player.requests[number]
    wanted = expected(rig, playing.ids[: playing.done], anchor, playing.decoder_from)
    assert made.tokens[row].tolist() == wanted.tokens[0].tolist()
    assert relative(made.logits[row], wanted.logits[0]) < 1e-4
    assert relative(made.confidence[row], wanted.confidence[0]) < 1e-4


@pytest.mark.parametrize("variant", DRAFTING)
@pytest.mark.parametrize("verify_rows", [1, 6])
def test_blocks_are_the_references(variant: str, verify_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, at and behind the window's length; compact replay cuts the context where it starts."""
    make_smooth(monkeypatch)
    rig = rig_of(variant)
    player = Player(rig.model, slots=6, verify_rows=verify_rows, drafter=drafter_of(rig))
    numbers = [player.add(text(rig, length, length), "off") for length in (1, 5, 6, 7, 40)]
    numbers.append(player.add(text(rig, 33), "compact", start=29))
    for number in numbers:
        player.run(number, 9)
    anchors = {number: 11 + number for number in numbers}
    made = drafted(player, anchors)
    for row, (number, anchor) in enumerate(anchors.items()):
        check(rig, player, number, anchor, made, row)


def test_a_slot_forgets_its_last_request(monkeypatch: pytest.MonkeyPatch) -> None:
    make_smooth(monkeypatch)
    rig = rig_of("all parts")
    player = Player(rig.model, slots=1, drafter=drafter_of(rig))
    player.end(0) if player.add(text(rig, 30)) == 0 and player.run(0, 30) else None
    number = player.add(text(rig, 3, seed=5))
    player.run(number, 2)
    check(rig, player, number, 9, drafted(player, {number: 9}))
