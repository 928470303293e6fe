"""Patches against the stored ones, to the bit, and against a slow construction of the same."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps
from safetensors.torch import load_file
from vocabulary import GOLDEN

from deepinfer.config.model import ModelConfig
from deepinfer.core.errors import RequestError
from deepinfer.text.images import plan_grid, preprocess

VISION = ModelConfig.from_file(GOLDEN / "checkpoint" / "config.json").vision
assert VISION is not None


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


@pytest.mark.parametrize("case", ["big", "tall", "tiny", "wide"])
def test_golden_patches(case: str) -> None:
    golden = load_file(GOLDEN / "vision_fp32.safetensors")
    result = preprocess(Image.fromarray(golden[f"{case}.rgb"].numpy()), VISION)
    grid = result.grid
    assert [grid.vit_rows, grid.vit_cols, grid.rows, grid.cols] == golden[f"{case}.grid"].tolist()
    assert result.patches.dtype == torch.float32
    assert torch.equal(result.patches, golden[f"{case}.patches"])


@given(width=st.integers(1, 90), height=st.integers(1, 90), seed=st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_patches_are_the_padded_image_in_reading_order(width: int, height: int, seed: int) -> None:
    image = noise(width, height, seed)
    result = preprocess(image, VISION)
    padded = ImageOps.pad(image, (result.grid.width, result.grid.height), color=(127, 127, 127))
    p = VISION.patch_size
    assert result.patches.shape == (result.grid.vit_rows * result.grid.vit_cols, 3, p, p)
    for index in {0, len(result.patches) - 1, seed * len(result.patches) // 10}:
        row, col = divmod(index, result.grid.vit_cols)
        box = padded.crop((col * p, row * p, (col + 1) * p, (row + 1) * p))
        values = torch.tensor(np.asarray(box).transpose(2, 0, 1).astype(np.float32))
        assert torch.equal(result.patches[index], ((values / 255 - 0.5) / 0.5).bfloat16().float())


def test_values_are_bf16_between_minus_one_and_one() -> None:
    patches = preprocess(noise(64, 64), VISION).patches
    assert torch.equal(patches, patches.bfloat16().float())
    assert (patches.min(), patches.max()) == (-1, 1)


@pytest.mark.parametrize(("colour", "value"), [((0, 0, 0), -1.0), ((255, 255, 255), 1.0)])
def test_plain_images(colour: tuple[int, int, int], value: float) -> None:
    assert torch.equal(preprocess(Image.new("RGB", (16, 16), colour), VISION).patches, torch.full((16, 3, 4, 4), value))


def test_the_rest_is_padded_with_grey_on_both_sides() -> None:
    image = Image.new("RGB", (18, 16), (255, 255, 255))  # planned 20 x 16: a column of grey left and right
    rows = preprocess(image, VISION).patches.view(4, 5, 3, 4, 4).permute(0, 3, 1, 4, 2).reshape(16, 20, 3)
    grey = torch.tensor((127 / 255 - 0.5) / 0.5).bfloat16().float()
    assert torch.equal(rows[:, [0, -1]], grey.expand(16, 2, 3))
    assert torch.equal(rows[:, 1:-1], torch.ones(16, 18, 3))


def test_an_image_wider_than_the_ratio_is_squeezed_not_padded() -> None:
    limited = dataclasses.replace(VISION, max_wh_ratio=2.0)
    image = noise(64, 16)
    result = preprocess(image, limited)
    assert result.grid == plan_grid(32, 16, VISION)
    squeezed = torch.tensor(np.asarray(image.resize((32, 16))).astype(np.float32))
    expected = ((squeezed / 255 - 0.5) / 0.5).bfloat16().float()
    assert torch.equal(result.patches.view(4, 8, 3, 4, 4).permute(0, 3, 1, 4, 2).reshape(16, 32, 3), expected)


def test_the_image_itself_is_not_changed() -> None:
    image = noise(33, 21)
    before = image.tobytes()
    preprocess(image, VISION)
    assert (image.size, image.tobytes()) == ((33, 21), before)


@pytest.mark.parametrize("mode", ["L", "RGBA", "P"])
def test_only_rgb_is_taken(mode: str) -> None:
    with pytest.raises(RequestError, match=f"expected an RGB image, got mode {mode}"):
        preprocess(Image.new(mode, (8, 8)), VISION)
