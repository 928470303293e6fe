"""Sends images through the vision tower as plans say, and keeps their embeddings until a plan drops them."""

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from operator import attrgetter

import torch
from torch import Tensor

from deepinfer.config.model import VisionConfig
from deepinfer.core.errors import EngineError
from deepinfer.core.plan import Encode
from deepinfer.model.vision import VisionWeights, enter_tower, leave_tower, run_blocks
from deepinfer.text.images import ImageInput

ImageOf = Callable[[Encode], ImageInput]


class VisionStage:
    """Embeddings and half-encoded images, by digest; the scheduler keeps the books."""

    def __init__(self, config: VisionConfig, weights: VisionWeights, alone: bool) -> None:
        """`alone`: every image by itself, so that its embedding cannot depend on what is encoded beside it."""
        self._config, self._weights, self._alone = config, weights, alone
        self._states: dict[str, Tensor] = {}
        self._cells: dict[str, Tensor] = {}

    def __contains__(self, digest: object) -> bool:
        return digest in self._cells

    def cells(self, image: ImageInput) -> Tensor:
        """Embeddings of an image's tokens: dense [rows * cols, H]; zeros for an image that was not encoded."""
        found = self._cells.get(image.digest)
        if found is None:
            bias = self._weights.w2.bias
            return bias.new_zeros(image.grid.rows * image.grid.cols, len(bias))
        return found

    def drop(self, digests: Iterable[str]) -> None:
        """Let go of images, whole or half-encoded."""
        for digest in digests:
            self._cells.pop(digest, None)
            self._states.pop(digest, None)

    def run(self, encodes: Sequence[Encode], image_of: ImageOf) -> dict[int, EngineError]:
        """Encode; returns the requests whose image cannot be, and why. Nobody else's suffers from it."""
        failed: dict[int, EngineError] = {}
        for group in self._groups(encodes, image_of):
            try:
                self._advance(group, image_of)
            except Exception as error:
                if len(group) > 1:  # find out which one it is
                    for encode in group:
                        failed |= self.run([encode], image_of)
                    continue
                self.drop([group[0].digest])
                failed[group[0].request_id] = EngineError(
                    f"image {group[0].place} cannot be encoded: {type(error).__name__}: {error}"
                )
        return failed

    def _groups(self, encodes: Sequence[Encode], image_of: ImageOf) -> list[list[Encode]]:
        """Images that go through the same blocks together, those of one size side by side."""
        if self._alone:
            return [[encode] for encode in encodes]
        stretch = attrgetter("first", "end")
        ordered = sorted(encodes, key=lambda encode: (*stretch(encode), len(image_of(encode).patches)))
        return [list(group) for _, group in groupby(ordered, stretch)]

    def _advance(self, group: Sequence[Encode], image_of: ImageOf) -> None:
        first, end, images = group[0].first, group[0].end, [image_of(encode) for encode in group]
        grids = [image.grid for image in images]
        if first == 0:
            x = enter_tower(images, self._weights)
        else:
            x = torch.cat([self._states[encode.digest] for encode in group])
        x = run_blocks(x, grids, self._config, self._weights.blocks[first:end])
        if group[0].last:
            made: Sequence[Tensor] = leave_tower(x, grids, self._config, self._weights)
        else:
            made = torch.split(x, [grid.patches for grid in grids])
        for encode, part in zip(group, made, strict=True):
            self._states.pop(encode.digest, None)
            kept = self._cells if encode.last else self._states
            kept[encode.digest] = part if len(group) == 1 else part.clone()  # a part alone would keep all in memory
