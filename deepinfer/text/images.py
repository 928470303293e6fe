"""Pixels to patches: the grid plan, the resize and the normalisation that the vision tower was trained with."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from deepinfer.config.model import VisionConfig
from deepinfer.core.errors import RequestError
from deepinfer.text.pixels import load_image

__all__ = [
    "END",
    "IMAGE",
    "NEWLINE",
    "START",
    "TEXT",
    "ImageGrid",
    "ImageInput",
    "expand_images",
    "image_types",
    "load_image",
    "plan_grid",
    "preprocess",
]

TEXT, START, IMAGE, NEWLINE, END = -1, 0, 1, 2, 3
_GREY = (127, 127, 127)


@dataclass(frozen=True)
class ImageGrid:
    """Resized size in pixels, its patches (`vit_*`) and the image tokens they merge into (`rows`, `cols`)."""

    height: int
    width: int
    vit_rows: int
    vit_cols: int
    rows: int
    cols: int

    @property
    def patches(self) -> int:
        """How many the vision tower reads."""
        return self.vit_rows * self.vit_cols

    @property
    def tokens(self) -> int:
        """Length of the span in the prompt: image tokens, a newline a row, a start and an end."""
        return self.rows * (self.cols + 1) + 2


@dataclass(frozen=True)
class ImageInput:
    """Patches [vit_rows * vit_cols, 3, patch, patch], row-major, FP32 holding BF16-rounded values in -1 .. 1."""

    patches: Tensor
    grid: ImageGrid

    @cached_property
    def digest(self) -> str:
        """Name of the content: equal for equal patches in equal grids alone."""
        shape = f"{self.grid.vit_rows}x{self.grid.vit_cols}".encode()
        return blake2b(shape + self.patches.numpy().tobytes(), digest_size=16).hexdigest()


def plan_grid(width: int, height: int, vision: VisionConfig) -> ImageGrid:
    """Choose the size an image of width x height pixels is resized to; RequestError if no grid fits the budget."""
    if width < 1 or height < 1:
        raise RequestError(f"an image of {width} x {height} pixels is empty; both sides must be at least 1")
    planned_width, planned_height = _at_least_min_pixels(_limited_width(width, height, vision), height, vision)
    patch = vision.patch_size
    grid = _grid(math.ceil(planned_height / patch) * patch, math.ceil(planned_width / patch) * patch, vision)
    if grid.tokens > vision.max_image_tokens and planned_width > 0:
        grid = _grid(*_shrunk(planned_width, planned_height, vision), vision)
    if min(grid.height, grid.width) < 1 or grid.tokens > vision.max_image_tokens:
        raise RequestError(
            f"an image of {width} x {height} pixels does not fit {vision.max_image_tokens} image tokens "
            f"(planned {grid.width} x {grid.height}); make it less elongated"
        )
    return grid


def preprocess(image: Image.Image, vision: VisionConfig) -> ImageInput:
    """Resize an RGB image to its planned grid, pad it with grey, and cut it into normalised patches."""
    grid = plan_grid(image.width, image.height, vision)
    size = (grid.width, grid.height)
    if image.mode != "RGB":
        raise RequestError(f"expected an RGB image, got mode {image.mode}; load it with load_image")
    if _limited_width(image.width, image.height, vision) != image.width:
        resized = image.resize(size)
    else:
        resized = ImageOps.pad(image, size, color=_GREY)
    pixels = torch.from_numpy(np.asarray(resized).copy()).to(torch.float32)  # [height, width, 3]
    values = ((pixels / 255 - 0.5) / 0.5).to(torch.bfloat16).to(torch.float32)
    patch = vision.patch_size
    cells = values.reshape(grid.vit_rows, patch, grid.vit_cols, patch, 3).permute(0, 2, 4, 1, 3)
    return ImageInput(cells.reshape(-1, 3, patch, patch).contiguous(), grid)


def image_types(grid: ImageGrid) -> list[int]:
    """Return the kind of every token of an image span: START, then per row its IMAGE tokens and a NEWLINE, END."""
    return [START, *([IMAGE] * grid.cols + [NEWLINE]) * grid.rows, END]


def expand_images(
    ids: Sequence[int], grids: Sequence[ImageGrid], image_token_id: int | None
) -> tuple[list[int], list[int]]:
    """Replace each placeholder, in order, by the span of its image.

    Returns ids and types of equal length: every token of a span has `image_token_id`, text has type TEXT.
    RequestError unless there are as many placeholders as images.
    """
    places = sum(token_id == image_token_id for token_id in ids)
    if places != len(grids):
        raise RequestError(f"the prompt has {places} image placeholders (id {image_token_id}) but {len(grids)} images")
    left = iter(grids)
    out_ids: list[int] = []
    types: list[int] = []
    for token_id in ids:
        span = image_types(next(left)) if token_id == image_token_id else [TEXT]
        out_ids += [token_id] * len(span)
        types += span
    return out_ids, types


def _limited_width(width: int, height: int, vision: VisionConfig) -> float:
    ratio = vision.max_wh_ratio
    return height * ratio if ratio is not None and width > height * ratio else width


def _at_least_min_pixels(width: float, height: float, vision: VisionConfig) -> tuple[float, float]:
    if width * height >= vision.min_pixels:
        return width, height
    factor = math.sqrt(vision.min_pixels / (width * height))
    return int(width * factor), int(height * factor)


def _grid(height: int, width: int, vision: VisionConfig) -> ImageGrid:
    vit_rows, vit_cols = height // vision.patch_size, width // vision.patch_size
    merge = vision.downsample_ratio
    return ImageGrid(height, width, vit_rows, vit_cols, math.ceil(vit_rows / merge), math.ceil(vit_cols / merge))


def _shrunk(width: float, height: float, vision: VisionConfig) -> tuple[int, int]:
    """Return (height, width) of the largest grid of about the same shape whose span fits the token budget.

    With mw merged columns and mh = mw * aspect rows, mh * (mw + 1) = budget - 2 gives mw.
    """
    patch, cell, budget = vision.patch_size, vision.patch_size * vision.downsample_ratio, vision.max_image_tokens
    aspect = height / width
    merged_width = math.sqrt((budget - 2) / aspect + 0.25) - 0.5
    merged_height = merged_width * aspect
    if merged_width < 1:
        return (budget - 2) // 2 * cell, cell
    if merged_height < 1:
        return cell, (budget - 3) * cell
    factor = min(math.floor(merged_width) * cell / width, math.floor(merged_height) * cell / height)
    return math.floor(height * factor / patch) * patch, math.floor(width * factor / patch) * patch
