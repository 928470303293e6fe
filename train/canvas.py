"""Images of different grids laid on one canvas of patches, so that a batch has static shapes."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from deepinfer.config.model import VisionConfig
from deepinfer.text.images import plan_grid
from train.batch import Batch


class Canvas:
    """Places patches of an image row by row at the top left; the grid's rotary angles and merges stay the same."""

    def __init__(self, sizes: Sequence[tuple[int, int]], vision: VisionConfig) -> None:
        """`sizes` are the (width, height) of the images that occur."""
        grids = [plan_grid(width, height, vision) for width, height in sizes]
        self.rows = max(grid.vit_rows for grid in grids)
        self.cols = max(grid.vit_cols for grid in grids)
        self._ratio = vision.downsample_ratio
        self._merged_cols = -(-self.cols // self._ratio)
        self._merged = -(-self.rows // self._ratio) * self._merged_cols

    def place(self, batch: Batch) -> dict[str, Tensor]:
        """`patches` [N, rows * cols, 3, p, p], `patch_mask` bool [N, rows * cols] and `cells` int64 [N * merged].

        `cells` lists, image by image, where each merged token lies among the canvases' merged cells; the rest is 0.
        """
        patches, grids = batch["patches"], batch["grid"]
        count = len(patches)
        canvas = np.zeros((count, self.rows, self.cols, *patches.shape[2:]), np.float32)
        mask = np.zeros((count, self.rows, self.cols), bool)
        cells: list[int] = []
        for image, (rows, cols) in enumerate(grids.tolist()):
            canvas[image, :rows, :cols] = patches[image, : rows * cols].reshape(rows, cols, *patches.shape[2:])
            mask[image, :rows, :cols] = True
            if batch["image_row"][image] >= 0:
                found = np.arange(-(-rows // self._ratio))[:, None] * self._merged_cols
                cells += (image * self._merged + found + np.arange(-(-cols // self._ratio))).ravel().tolist()
        padded = np.zeros(count * self._merged, np.int64)
        padded[: len(cells)] = cells
        return {
            "patches": torch.from_numpy(canvas.reshape(count, -1, *patches.shape[2:])),
            "patch_mask": torch.from_numpy(mask.reshape(count, -1)),
            "cells": torch.from_numpy(padded),
        }
