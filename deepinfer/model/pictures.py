"""The images of a prompt, as the rows of a step need them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deepinfer.core.batch import Pictures
from deepinfer.text.images import IMAGE, TEXT, ImageInput

CellsOf = Callable[[ImageInput], Tensor]
"""The embeddings of an image's tokens: [rows * cols, H]."""


@dataclass(frozen=True)
class PicturePart:
    """A stretch of a prompt with image tokens: types int64 [n] of all its tokens, cells [c, H] of its image tokens."""

    types: npt.NDArray[np.int64]
    cells: Tensor


class PromptImages:
    """The images of one request. A prompt may be read in chunks of any size, and again from any position."""

    def __init__(self, token_types: Sequence[int], images: Sequence[ImageInput]) -> None:
        self._types: npt.NDArray[np.int64] = np.array(token_types, dtype=np.int64)
        self._cells_before = np.concatenate(([0], np.cumsum(self._types == IMAGE)))
        self._images = images
        self._starts = [0, *accumulate(image.grid.rows * image.grid.cols for image in images)]

    def part(self, first: int, end: int, cells_of: CellsOf) -> PicturePart | None:
        """What the tokens at positions first to end - 1 need; None if they are all text (as generated ones are)."""
        types = np.full(end - first, TEXT, dtype=np.int64)
        inside = self._types[first:end]
        types[: len(inside)] = inside
        if (types == TEXT).all():
            return None
        cells = [cells_of(self._images[place])[low:high] for place, low, high in self._pieces(first, end) if low < high]
        return PicturePart(types, torch.cat(cells) if cells else torch.empty(0, 0))

    def read(self, first: int, end: int) -> list[int]:
        """Numbers of the images whose embeddings the tokens at positions first to end - 1 need."""
        return [place for place, low, high in self._pieces(first, end) if low < high]

    def _pieces(self, first: int, end: int) -> Iterator[tuple[int, int, int]]:
        """For every image the cells of it, low to high - 1, that are at these positions."""
        low, high = (int(self._cells_before[min(place, len(self._types))]) for place in (first, end))
        for place, (start, stop) in enumerate(pairwise(self._starts)):
            yield place, max(low - start, 0), min(high, stop) - start


def combine(parts: Sequence[tuple[int, PicturePart]], rows: int, hidden: int, like: Tensor) -> Pictures:
    """Bring parts, each with its first row, into a step of `rows` rows; device and dtype are those of `like`."""
    types = np.full(rows, TEXT, dtype=np.int64)
    for first, part in parts:
        types[first : first + len(part.types)] = part.types
    places = [first + np.flatnonzero(part.types == IMAGE) for first, part in parts]
    cells = [part.cells.view(-1, hidden).to(like) for _, part in parts]
    return Pictures(
        types=torch.from_numpy(types).to(like.device),
        cells=torch.cat(cells),
        rows=torch.from_numpy(np.concatenate(places)).to(like.device),
    )
