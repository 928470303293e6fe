"""The stage that encodes: what it keeps, what it lets go, and that alone means the same bits in any company."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from model_rig import Rig, rig_of
from test_model_images import GRIDS, picture

from deepinfer.core.plan import Encode
from deepinfer.engine import vision_stage
from deepinfer.engine.vision_stage import VisionStage
from deepinfer.model.vision import embed_images
from deepinfer.ops.choice import batch_invariant

RIG: Rig = rig_of("all parts")
IMAGES = [picture(grid, seed) for seed, grid in enumerate([*GRIDS.values(), GRIDS["padded"]])]
BLOCKS = len(RIG.model.weights.vision.blocks)


def stage(alone: bool = False) -> VisionStage:
    return VisionStage(RIG.model.config.vision, RIG.model.weights.vision, alone)


def encode(place: int, first: int = 0, end: int = BLOCKS) -> Encode:
    return Encode(IMAGES[place].digest, 10 + place, place, first, end, end == BLOCKS)


@torch.inference_mode()
def run(made: VisionStage, *encodes: Encode) -> dict[int, Any]:
    return made.run(encodes, lambda one: IMAGES[one.place])


def test_there_are_blocks_to_split() -> None:
    assert BLOCKS >= 2


def test_images_on_their_way_and_through() -> None:
    """Some begin, some go on, some end in one step; they give what one go gives."""
    made = stage()
    assert not run(made, encode(0, 0, 1), encode(1, 0, 1), encode(2))
    assert [image.digest in made for image in IMAGES] == [False, False, True, False]
    assert not run(made, encode(3), encode(0, 1), encode(1, 1))
    assert not made._states
    for image in IMAGES:
        (wanted,) = embed_images([image], RIG.model.config.vision, RIG.model.weights.vision)
        assert (made.cells(image) - wanted).abs().max() < 1e-5
        assert made.cells(image).untyped_storage().nbytes() == made.cells(image).nbytes, "it keeps its neighbours alive"


def test_what_is_dropped_is_gone() -> None:
    made = stage()
    run(made, encode(0), encode(1, 0, 1))
    made.drop([IMAGES[0].digest, IMAGES[1].digest, "unknown"])
    assert IMAGES[0].digest not in made
    assert not made._states
    assert made.cells(IMAGES[0]).abs().max() == 0
    failed = run(made, encode(1, 1), encode(2))
    assert list(failed) == [11], "its beginning was dropped"
    assert IMAGES[2].digest in made


@pytest.mark.parametrize("place", range(3))
def test_the_guilty_one_is_found(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    original = vision_stage.run_blocks

    def broken(x: torch.Tensor, grids: Sequence[Any], *rest: Any) -> torch.Tensor:
        if IMAGES[place].grid in grids:
            raise ValueError("no such image")
        return original(x, grids, *rest)

    monkeypatch.setattr(vision_stage, "run_blocks", broken)
    made = stage()
    failed = run(made, *map(encode, range(3)))
    assert {number: str(error) for number, error in failed.items()} == {
        10 + place: f"image {place} cannot be encoded: ValueError: no such image"
    }
    assert [image.digest in made for image in IMAGES[:3]] == [other != place for other in range(3)]


def test_alone_the_bits_do_not_depend_on_company_or_steps() -> None:
    courses = [
        [[encode(1)]],
        [[encode(0), encode(1), encode(2), encode(3)]],
        [[encode(3, 0, 1), encode(1, 0, 1)], [encode(1, 1), encode(3, 1), encode(0)]],
    ]
    found = []
    for course in courses:
        made = stage(alone=True)
        with batch_invariant():
            for step in course:
                assert not run(made, *step)
        found.append(made.cells(IMAGES[1]))
    assert all(torch.equal(found[0], other) for other in found[1:])
