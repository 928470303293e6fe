"""The operators that attention by rows is made of, and where there are kernels of them."""

from typing import Protocol

import torch
from torch import Tensor

from deepinfer.config.model import ModelConfig
from deepinfer.ops.linear import Weight
from deepinfer.ops.rows import Index

_HOPPER = 9


class RowOperators(Protocol):
    """`deepinfer.ops.rows.torch` or `.nvidia`; see that package."""

    def window_rows(
        self, x: Tensor, norm: Tensor, turns: Tensor, eps: float, places: Tensor, packed: Tensor, ring: Tensor
    ) -> None:
        """Norm, rotate and store keys."""

    def attend(
        self,
        q: Tensor,
        turns: Tensor,
        windows: Tensor,
        near: Tensor,
        latents: Tensor | None,
        chosen: Tensor | None,
        sink: Tensor,
    ) -> Tensor:
        """Rotate queries and attend."""

    def output(self, o: Tensor, turns: Tensor, wo_a: Weight, wo_b: Weight) -> Tensor:
        """Rotate back and project."""

    def index_scores(self, q: Tensor, turns: Tensor, weights: Tensor, factor: float, index: Index) -> Tensor:
        """Score entries."""

    def best_entries(self, scores: Tensor, index: Index, count: int) -> Tensor:
        """Choose entries by their scores; their addresses."""

    def entry_rows(self, entries: Tensor, index: Index) -> Tensor:
        """Turn entries into addresses."""


def row_operators(config: ModelConfig, device: torch.device) -> RowOperators | None:
    """The kernels, if they are made for this model and device; SM90 is all they know."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != _HOPPER:
        return None
    from deepinfer.ops.rows import nvidia

    return nvidia if nvidia.fits(config) else None
