"""The arrays of one training batch."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from deepinfer.text.images import IMAGE, TEXT, ImageGrid
from train.rendering import Rendered

Batch = dict[str, NDArray[np.generic]]


class BatchBuilder:
    """Collects sequences row by row. With B rows, T tokens, N image slots, P patches and M merged tokens an image
    (those of the largest grid), `finish` returns

    ids int32 [B, T], padding where nothing was put; types int8 [B, T], -1 for text, else the kind of image token;
    loss_weight float32 [B, T]: the weight of predicting ids[b, t + 1] from position t (0 in the last column);
    document int32 [B, T]: the number of the document in its row, -1 for padding; a document begins with BOS. Every
    sample and every piece of text begins at an even position, so that pairs of tokens fall together as at inference
    (later documents of one piece of text may begin anywhere);
    patches float32 [N, P, 3, patch, patch], grid int32 [N, 2] (rows and columns of patches; the first grid for free
    slots), image_row int32 [N] (-1 for free slots), image_positions int32 [N, M]: the columns of its image tokens in
    row-major order, -1 beyond them.
    """

    def __init__(
        self, rows: int, tokens: int, images: int, bos: int, pad: int, grids: Sequence[ImageGrid], patch_size: int
    ) -> None:
        patches = max(grid.vit_rows * grid.vit_cols for grid in grids)
        merged = max(grid.rows * grid.cols for grid in grids)
        self.images_used = 0
        self._filled = [0] * rows
        self._documents = [0] * rows
        self._bos = bos
        self._ids = np.full((rows, tokens), pad, np.int32)
        self._types = np.full((rows, tokens), TEXT, np.int8)
        self._weight = np.zeros((rows, tokens), np.float32)
        self._document = np.full((rows, tokens), -1, np.int32)
        self._patches = np.zeros((images, patches, 3, patch_size, patch_size), np.float32)
        self._grid = np.tile(np.array([[grids[0].vit_rows, grids[0].vit_cols]], np.int32), (images, 1))
        self._image_row = np.full(images, -1, np.int32)
        self._positions = np.full((images, merged), -1, np.int32)

    def append(self, row: int, sequence: Rendered) -> None:
        """Put a sequence at the next even position of a row; ValueError if it does not fit."""
        start = self._filled[row]
        end = start + len(sequence.ids)
        if end > self._ids.shape[1]:
            raise ValueError(f"row {row} has {self._ids.shape[1] - start} places left, not {len(sequence.ids)}")
        self._ids[row, start:end] = sequence.ids
        self._types[row, start:end] = sequence.types
        self._weight[row, start : end - 1] = sequence.target_weight[1:]
        numbers = self._documents[row] - 1 + np.cumsum(sequence.ids == self._bos)
        self._document[row, start:end] = numbers
        self._documents[row] = int(numbers[-1]) + 1
        self._put_images(row, start, sequence)
        self._filled[row] = end + end % 2

    def _put_images(self, row: int, start: int, sequence: Rendered) -> None:
        columns = start + np.flatnonzero(sequence.types == IMAGE)
        done = 0
        for image in sequence.images:
            slot, patches, merged = self.images_used, len(image.patches), image.grid.rows * image.grid.cols
            self._patches[slot, :patches] = image.patches.numpy()
            self._grid[slot] = image.grid.vit_rows, image.grid.vit_cols
            self._image_row[slot] = row
            self._positions[slot, :merged] = columns[done : done + merged]
            done += merged
            self.images_used += 1

    def finish(self) -> Batch:
        """The arrays; the builder must not be used afterwards."""
        return {
            "ids": self._ids,
            "types": self._types,
            "loss_weight": self._weight,
            "document": self._document,
            "patches": self._patches,
            "grid": self._grid,
            "image_row": self._image_row,
            "image_positions": self._positions,
        }
