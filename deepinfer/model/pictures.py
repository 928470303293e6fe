"""The images of a prompt, embedded when a step first reaches them and kept until their last token has been read."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deepinfer.core.batch import Pictures
from deepinfer.text.images import IMAGE, TEXT, ImageInput

Embed = Callable[[ImageInput], Tensor]


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
        self._embedded: dict[int, Tensor] = {}

    def part(self, first: int, end: int, embed: Embed) -> PicturePart | None:
        """What the tokens at positions first to end - 1 need; None if they are all text (as generated ones are)."""
        types = np.full(end - first, TEXT, dtype=np.int64)
        inside = self._types[first:end]
        types[: len(inside)] = inside
        if (types == TEXT).all():
            return None
        low, high = (int(self._cells_before[min(place, len(self._types))]) for place in (first, end))
        cells = [self._cells(image, low, high, embed) for image in range(len(self._images))]
        found = [part for part in cells if part is not None]
        return PicturePart(types, torch.cat(found) if found else torch.empty(0, 0))

    def _cells(self, image: int, low: int, high: int, embed: Embed) -> Tensor | None:
        """Those of an image's cells that are among the prompt's cells low to high - 1."""
        start, stop = self._starts[image], self._starts[image + 1]
        if high <= start or stop <= low:
            return None
        if image not in self._embedded:
            self._embedded[image] = embed(self._images[image])
        cells = self._embedded[image][max(low - start, 0) : high - start]
        if high >= stop:
            del self._embedded[image]
        return cells


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
