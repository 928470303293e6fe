"""Images through the tower, packed and in parts, and through the model over caches, in chunks of any size."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from model_rig import Player, Rig, error, make_smooth, rig_of, text

from deepinfer.model import model, vision
from deepinfer.model.pictures import PicturePart, PromptImages, combine
from deepinfer.model.vision import embed_images, enter_tower, leave_tower, run_blocks
from deepinfer.text.images import IMAGE, ImageGrid, ImageInput, expand_images

LIMIT = 2e-5
GRIDS = {
    "one cell": ImageGrid(8, 8, 2, 2, 1, 1),
    "padded": ImageGrid(12, 20, 3, 5, 2, 3),
    "a column": ImageGrid(28, 4, 7, 1, 4, 1),
}


def picture(grid: ImageGrid, seed: int = 0) -> ImageInput:
    generator = torch.Generator().manual_seed(seed)
    return ImageInput(torch.randn(grid.vit_rows * grid.vit_cols, 3, 4, 4, generator=generator).bfloat16().float(), grid)


def prompt(rig: Rig, images: Sequence[ImageInput], texts: Sequence[int], seed: int = 0) -> tuple[list[int], list[int]]:
    """Stretches of text of these lengths with an image after each but the last: (ids, types)."""
    marker = rig.model.config.image_token_id
    assert marker is not None
    ids: list[int] = []
    for place, length in enumerate(texts):
        ids += text(rig, length, seed + place) + ([marker] if place < len(images) else [])
    return expand_images(ids, [image.grid for image in images], marker)


@pytest.fixture
def smooth(monkeypatch: pytest.MonkeyPatch) -> None:
    make_smooth(monkeypatch)


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_embeddings_are_the_reference_towers(grid: ImageGrid, dtype: torch.dtype) -> None:
    rig, image = rig_of("all parts", dtype), picture(grid)
    config, weights = rig.model.config.vision, rig.model.weights.vision
    assert config is not None
    assert weights is not None
    with torch.inference_mode():
        (made,) = embed_images([image], config, weights)
        wanted = rig.reference.embed_images([image])
    assert made.dtype is dtype
    limit = 1e-5 if dtype is torch.float32 else 3e-2
    assert ((made - wanted).float().norm(dim=-1) / wanted.float().norm(dim=-1)).max() < limit


@pytest.mark.usefixtures("smooth")
@pytest.mark.parametrize("mode", ["off", "mask", "compact"])
@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 64])
def test_images_cut_by_chunks(mode: str, chunk: int) -> None:
    rig = rig_of("all parts")
    images = [picture(grid, seed) for seed, grid in enumerate(GRIDS.values())]
    ids, types = prompt(rig, images, (3, 0, 5, 4))
    player = Player(rig.model)
    number = player.add(ids, mode, len(ids) - 12, types, images)
    assert error(rig, player.run(number, chunk)) < LIMIT


@pytest.mark.usefixtures("smooth")
def test_images_beside_text_and_other_images() -> None:
    rig = rig_of("all parts")
    player = Player(rig.model, slots=3)
    images = [picture(GRIDS["padded"], seed) for seed in (1, 2)]
    first, second = prompt(rig, images[:1], (0, 9), seed=1), prompt(rig, images[1:], (6, 2), seed=2)
    numbers = [
        player.add(first[0], "compact", 5, first[1], images[:1]),
        player.add(text(rig, 30), "off"),
        player.add(second[0], "mask", 4, second[1], images[1:]),
    ]
    while any(playing.done < len(playing.ids) for playing in player.requests.values()):
        left = {number: len(playing.ids) - playing.done for number, playing in player.requests.items()}
        player.step({number: min(4, rows) for number, rows in left.items() if rows})
    assert all(error(rig, player.requests[number]) < LIMIT for number in numbers)


def routed_like_text(patch: pytest.MonkeyPatch, _: Rig) -> None:
    original = model.mixture
    patch.setattr(model, "mixture", lambda h, is_image, *rest: original(h, None, *rest))


def read_by_engram(patch: pytest.MonkeyPatch, rig: Rig) -> None:
    patch.setattr(rig.model, "_classes", rig.model._classes.clamp(min=3))


def confused_markers(patch: pytest.MonkeyPatch, rig: Rig) -> None:
    vision = rig.model.weights.vision
    patch.setattr(
        rig.model, "weights", replace(rig.model.weights, vision=replace(vision, markers=vision.markers.roll(1, 0)))
    )


def one_large_image(patch: pytest.MonkeyPatch, _: Rig) -> None:
    patch.setattr(vision, "_runs", lambda grids: [(0, 1, sum(grid.patches for grid in grids))])


@pytest.mark.usefixtures("smooth")
@pytest.mark.parametrize("fault", [None, routed_like_text, read_by_engram, confused_markers, one_large_image])
def test_what_is_special_about_images_is_noticed(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Routing by the second bias, an Engram that does not see them, learned markers, attention within an image."""
    rig = rig_of("all parts")
    if fault is not None:
        fault(monkeypatch, rig)
    images = [picture(grid, seed) for seed, grid in enumerate(GRIDS.values())]
    ids, types = prompt(rig, images, (3, 0, 5, 4))
    player = Player(rig.model)
    found = error(rig, player.run(player.add(ids, "off", 0, types, images), 7))
    assert found < LIMIT if fault is None else found > 10 * LIMIT


class TestPacked:
    """Images of different sizes in one go."""

    rig = rig_of("all parts")
    images: ClassVar = [picture(grid, seed) for seed, grid in enumerate([*GRIDS.values(), *GRIDS.values()])]

    @torch.inference_mode()
    def test_each_is_what_it_is_alone(self) -> None:
        config, weights = self.rig.model.config.vision, self.rig.model.weights.vision
        packed = embed_images(sorted(self.images, key=lambda image: image.grid.patches), config, weights)
        alone = [embed_images([image], config, weights)[0] for image in self.images]
        for made, wanted in zip(packed, sorted(alone, key=len), strict=True):
            assert made.shape == wanted.shape
        order = sorted(range(len(alone)), key=lambda place: self.images[place].grid.patches)
        for made, place in zip(packed, order, strict=True):
            assert (made - alone[place]).abs().max() < 1e-5

    @torch.inference_mode()
    def test_no_image_hears_of_another(self) -> None:
        """Another neighbour, not a number in it, changes nothing, to the bit."""
        config, weights = self.rig.model.config.vision, self.rig.model.weights.vision
        first, other, last = self.images[:3]
        noise = ImageInput(torch.full_like(other.patches, torch.nan), other.grid)
        calm = embed_images([first, other, last], config, weights)
        loud = embed_images([first, noise, last], config, weights)
        assert torch.equal(calm[0], loud[0])
        assert torch.equal(calm[2], loud[2])
        assert loud[1].isnan().all()

    @torch.inference_mode()
    def test_blocks_in_parts_are_blocks_in_one_go(self) -> None:
        config, weights = self.rig.model.config.vision, self.rig.model.weights.vision
        grids = [image.grid for image in self.images]
        x = enter_tower(self.images, weights)
        for block in weights.blocks:
            x = run_blocks(x, grids, config, [block])
        whole = embed_images(self.images, config, weights)
        for made, wanted in zip(leave_tower(x, grids, config, weights), whole, strict=True):
            assert torch.equal(made, wanted)


class TestParts:
    """`PromptImages` on its own; cells are numbered instead of embedded."""

    def images(self) -> PromptImages:
        grids = [GRIDS["padded"], GRIDS["one cell"]]
        marker = 4
        _, types = expand_images([7, marker, 7, 7, marker, 7], grids, marker)
        return PromptImages(types, [picture(grid, seed) for seed, grid in enumerate(grids)])

    @pytest.mark.parametrize("size", [1, 2, 3, 5, 50])
    def test_parts_are_the_whole_in_pieces(self, size: int) -> None:
        length = 2 + 10 + 1 + 4 + 1
        whole = self.images().part(0, length, self.numbered)
        assert whole is not None
        images, types, cells = self.images(), [], []
        for first in range(0, length, size):
            end = min(first + size, length)
            part = images.part(first, end, self.numbered)
            types += [-1] * (end - first) if part is None else part.types.tolist()
            cells += [] if part is None else part.cells.flatten().tolist()
        assert types == whole.types.tolist()
        assert cells == whole.cells.flatten().tolist() == [60, 61, 62, 63, 64, 65, 10]
        assert types.count(IMAGE) == len(cells)

    def test_generated_tokens_are_text(self) -> None:
        assert self.images().part(18, 25, self.numbered) is None
        part = self.images().part(15, 25, self.numbered)
        assert part is not None
        assert part.types.tolist() == [2, 3] + [-1] * 8

    def test_what_is_read(self) -> None:
        images = self.images()
        assert images.read(0, 18) == [0, 1]
        assert images.read(0, 2) == images.read(10, 13) == images.read(15, 30) == []  # text and what frames an image
        assert images.read(2, 3) == images.read(8, 12) == [0]
        assert images.read(8, 15) == [0, 1]

    @staticmethod
    def numbered(image: ImageInput) -> torch.Tensor:
        count = image.grid.rows * image.grid.cols
        return 10.0 * count + torch.arange(count)[:, None]


def test_a_steps_pictures_lie_where_the_model_does() -> None:
    """A part may hold markers alone, whose cells were never made on the model's device."""
    like = torch.empty(1, 8, device="meta", dtype=torch.bfloat16)
    markers = PicturePart(np.array([0, 2]), torch.empty(0, 0))
    cells = PicturePart(np.array([1, 1, 3]), torch.empty(2, 8))
    found = combine([(1, markers), (4, cells)], 8, 8, like)
    assert {found.types.device.type, found.cells.device.type, found.rows.device.type} == {"meta"}
    assert found.cells.shape == (2, 8)
    assert found.cells.dtype == torch.bfloat16
    on_cpu = combine([(1, markers), (4, cells)], 8, 8, torch.empty(1, 8))
    assert on_cpu.types.tolist() == [-1, 0, 2, -1, 1, 1, 3, -1]
    assert on_cpu.rows.tolist() == [4, 5]
