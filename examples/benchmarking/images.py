"""Images to measure with, and what the vision tower could do with them at best."""

from collections.abc import Sequence

import torch

from benchmarking.bounds import BYTES_PER_S, OPERATIONS_PER_S
from deepinfer.config.model import ModelConfig, VisionConfig
from deepinfer.core.errors import ConfigError
from deepinfer.text.images import ImageGrid, ImageInput, plan_grid

SIXTEEN_BIT = 0.56
"""The rate of 16-bit products, as a share of that of FP8."""


def parse_size(text: str) -> tuple[int, int]:
    """Width and height from `WxH`; ConfigError for anything else."""
    width, _, height = text.partition("x")
    if not (width.isdecimal() and height.isdecimal()):
        raise ConfigError(f"the image size is {text!r}; it takes a width and a height in pixels, such as 1302x1302")
    return int(width), int(height)


def vision_of(config: ModelConfig) -> VisionConfig:
    """ConfigError for a model without a vision tower."""
    if config.vision is None:
        raise ConfigError("this model has no vision tower")
    return config.vision


def random_image(vision: VisionConfig, width: int, height: int, seed: int) -> ImageInput:
    """Patches of noise in the grid of an image of this size."""
    grid = plan_grid(width, height, vision)
    shape = (grid.patches, 3, vision.patch_size, vision.patch_size)
    values = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    return ImageInput(values.to(torch.bfloat16).to(torch.float32), grid)


def tower_operations(config: ModelConfig, grids: Sequence[ImageGrid]) -> float:
    """Multiplications and additions of the products of tower and aligner, two for each pair."""
    vision = vision_of(config)
    width, pixels, merged = vision.hidden_size, 3 * vision.patch_size**2, vision.downsample_ratio**2
    total = 0.0
    for grid in grids:
        patches, cells = grid.patches, grid.rows * grid.cols
        dense = 4 * width * width + 3 * width * vision.intermediate_size
        block = patches * dense + 2 * patches * patches * width
        aligner = cells * config.hidden_size * (merged * width + config.hidden_size)
        total += 2 * (patches * pixels * width + vision.num_hidden_layers * block + aligner)
    return total


def tower_seconds(config: ModelConfig, grids: Sequence[ImageGrid], weight_bytes: int) -> float:
    """What an H200 needs at best: every weight read once or the products at the 16-bit rate, whichever takes longer."""
    operations = tower_operations(config, grids) / (SIXTEEN_BIT * OPERATIONS_PER_S)
    return max(operations, weight_bytes / BYTES_PER_S)
