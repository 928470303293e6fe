"""Where the rows of a step with drafts lie, from numbers that the device alone may know."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """Of R spans, S rows in all, W drafts at most.

    slots: int64 [R]. counts: int64 [R], drafts verified. drafts: int64 [R, W], with some that are not. owners, places:
    int64 [S], span and place in it of every row. rows: int64 [R, 1 + W], each span's rows among the S, the last one
    repeated.
    """

    slots: Tensor
    counts: Tensor
    drafts: Tensor
    owners: Tensor
    places: Tensor
    rows: Tensor

    @classmethod
    def of(cls, slots: Tensor, counts: Tensor, tokens: Tensor, rows: int, width: int) -> "Layout":
        """tokens: int64 [slots, G], the newest blocks. rows, width: S and W."""
        starts = counts.cumsum(0) - counts + torch.arange(len(counts), device=counts.device)
        owners, places = owners_and_places(counts + 1, rows)
        inside = torch.arange(width + 1, device=counts.device)
        own = starts[:, None] + torch.minimum(inside, counts[:, None])
        return cls(slots, counts, tokens[slots, :width], owners, places, own)

    @property
    def before(self) -> Tensor:
        """int64 [S, W], the drafts before each row, -1 elsewhere."""
        earlier = torch.arange(self.drafts.shape[1], device=self.drafts.device) < self.places[:, None]
        return torch.where(earlier, self.drafts[self.owners], -1)


def owners_and_places(counts: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """int64 [rows] each: whose every row is, and its place there, if `counts` int64 [R] say how many each has."""
    owners = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts, output_size=rows)
    first = (counts.cumsum(0) - counts)[owners]
    return owners, torch.arange(rows, device=counts.device) - first
