"""Content keys: equal exactly where tokens mean the same, images included."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from PIL import Image

from deepinfer.config.model import ModelConfig, VisionConfig
from deepinfer.core.request import TEXT, Request
from deepinfer.core.sampling_params import SamplingParams
from deepinfer.engine.content import content_keys
from deepinfer.text.images import ImageInput, image_types, preprocess

MARKER = 7


@pytest.fixture(scope="module")
def vision(tiny_checkpoint: Path) -> VisionConfig:
    found = ModelConfig.from_file(tiny_checkpoint / "config.json").vision
    assert found is not None
    return found


def picture(vision: VisionConfig, colour: str = "black", size: tuple[int, int] = (30, 20)) -> ImageInput:
    return preprocess(Image.new("RGB", size, colour), vision)


def request(*parts: Sequence[int] | ImageInput) -> Request:
    ids: list[int] = []
    types: list[int] = []
    for part in parts:
        kinds = image_types(part.grid) if isinstance(part, ImageInput) else [TEXT] * len(part)
        ids += [MARKER] * len(kinds) if isinstance(part, ImageInput) else part
        types += kinds
    images = tuple(part for part in parts if isinstance(part, ImageInput))
    return Request(0, None, tuple(ids), tuple(types), images, SamplingParams(), 0)


def test_text_is_its_ids() -> None:
    assert tuple(content_keys(request([3, 1, 2]))) == (3, 1, 2)


def test_an_image_token_is_its_picture_and_its_place(vision: VisionConfig) -> None:
    image = picture(vision)
    keys = content_keys(request([3, 1], image, [4]))
    span = keys[2:-1]
    assert (list(keys[:2]), keys[-1]) == ([3, 1], 4)
    assert len(span) == image.grid.tokens
    assert len(set(span)) == len(span)
    assert MARKER not in keys


def test_equal_pictures_have_equal_keys_wherever_they_stand(vision: VisionConfig) -> None:
    twice = content_keys(request([1], picture(vision), [2], picture(vision)))
    once = content_keys(request(picture(vision)))
    assert list(twice[1 : 1 + len(once)]) == list(twice[-len(once) :]) == list(once)


def test_one_pixel_changes_every_key_of_the_span(vision: VisionConfig) -> None:
    image = Image.new("RGB", (30, 20))
    image.putpixel((29, 19), (0, 0, 255))
    keys = [content_keys(request(shown)) for shown in (picture(vision), preprocess(image, vision))]
    assert len(keys[0]) == len(keys[1])
    assert set(keys[0]).isdisjoint(keys[1])


def test_the_same_bytes_in_another_grid_are_another_picture(vision: VisionConfig) -> None:
    wide, tall = picture(vision, size=(64, 16)), picture(vision, size=(16, 64))
    assert wide.patches.numpy().tobytes() == tall.patches.numpy().tobytes()
    assert set(content_keys(request(wide))).isdisjoint(content_keys(request(tall)))


def test_neighbouring_images_are_told_apart(vision: VisionConfig) -> None:
    black, white = picture(vision), picture(vision, "white")
    there, back = (list(content_keys(request(*pair))) for pair in ((black, white), (white, black)))
    half = len(there) // 2
    assert there == back[half:] + back[:half]
    assert there != back
