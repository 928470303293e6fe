"""Which tokens a row draws from: the lowest log-weight that top-k, top-p and min-p keep.

No row sorts the vocabulary. A short top-k lists its k largest; everything else finds its cut-off with three histograms
over the bits of the log-weights. Tokens with the same log-weight as the last one kept are kept with it.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deepinfer.sampling.transfer import floats, to_device
from deepinfer.sampling.weights import whole_weights

LONGEST_LIST = 1024
"""Largest k whose tokens are listed."""

_DIGITS = ((20, 11), (10, 10), (0, 10))
"""Shift and width of the parts of 31 bits, high ones first."""

_MAGNITUDE = 0x7FFFFFFF

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Limits:
    """What R rows draw from, on the host: FP64 [R] each. top_k: 0 for all. top_p: 1 for all. min_p: 0 for all."""

    top_k: Floats
    top_p: Floats
    min_p: Floats

    def of(self, rows: npt.NDArray[np.intp]) -> "Limits":
        """The limits of some rows."""
        return Limits(self.top_k[rows], self.top_p[rows], self.min_p[rows])


def exclude(log_weights: Tensor, limits: Limits) -> Tensor:
    """FP32 [R, V] `log_weights`, 0 for the likeliest token, with -inf where the limits keep nothing; may overwrite.

    First the top-k tokens are kept; of these, the fewest that have top-p of their probability; of these, the ones at
    least min-p times as probable as the likeliest.
    """
    bounded = (limits.top_k > 0) & (limits.top_k < log_weights.shape[-1])
    kinds = bounded * 4 + (bounded & (limits.top_k <= LONGEST_LIST)) * 2 + (limits.top_p < 1)
    kinds = np.where((kinds == 0) & (limits.min_p > 0), 8, kinds)
    for kind in np.unique(kinds):
        if kind:
            rows = np.flatnonzero(kinds == kind)
            everything = len(rows) == len(kinds)
            places = to_device(rows, log_weights.device)
            part = log_weights if everything else log_weights[places]
            part = _exclude_alike(part, limits.of(rows), bool(kind & 4), bool(kind & 2), bool(kind & 1))
            if everything:
                return part
            log_weights[places] = part
    return log_weights


def _exclude_alike(part: Tensor, limits: Limits, by_count: bool, listed: bool, by_mass: bool) -> Tensor:
    """`exclude` for rows that all do, or all do not, have a top-k, a short one, and a top-p."""
    with np.errstate(divide="ignore"):  # of 0: -inf
        cutoff = floats(np.log(limits.min_p), part.device)
    if by_count:
        counts = to_device(limits.top_k.astype(np.int64), part.device)
        largest = part.topk(int(limits.top_k.max())).values if listed else None
        if largest is not None:
            least = largest.gather(-1, counts[:, None] - 1).squeeze(-1)
        else:
            least = _cutoff(part, torch.ones(1, 1, dtype=torch.int64, device=part.device).expand(part.shape), counts)
        if by_mass:
            part = _keep(part, least)
        cutoff = torch.maximum(cutoff, least)
    if by_mass:
        weights = whole_weights(part)
        total = weights.sum(-1)
        share = to_device(limits.top_p, part.device) * total
        needed = torch.minimum(share.ceil().long().clamp(min=1), total)
        if by_count and largest is not None:
            least = _listed_cutoff(largest, counts, needed)
        else:
            least = _cutoff(part, weights, needed)
        cutoff = torch.maximum(cutoff, least)
    return _keep(part, cutoff)


def _keep(log_weights: Tensor, cutoff: Tensor) -> Tensor:
    return torch.where(log_weights < cutoff[:, None], -torch.inf, log_weights)


def _listed_cutoff(largest: Tensor, counts: Tensor, needed: Tensor) -> Tensor:
    """FP32 [R]: the log-weight with which the first of `largest` [R, K], of which `counts` count, weigh `needed`.

    Where all of them weigh less, the rest are tokens with the same log-weight as the last of them.
    """
    weights = whole_weights(largest)
    place = torch.searchsorted(weights.cumsum(-1), needed[:, None])
    return largest.gather(-1, torch.minimum(place, counts[:, None] - 1)).squeeze(-1)


def _cutoff(log_weights: Tensor, weights: Tensor, needed: Tensor) -> Tensor:
    """FP32 [R]: the highest cut-off above or at which the `weights` int64 [R, V] add up to `needed` int64 [R].

    The bits of a negative number's magnitude, read as a whole number, are in the order of the numbers. The first
    histogram is over the highest bits; each further one is over the next bits, of the numbers that share the bits that
    the ones before it found.
    """
    keys = log_weights.view(torch.int32) & _MAGNITUDE
    found = torch.zeros(len(keys), 1, dtype=torch.int32, device=keys.device)
    missing = needed[:, None]
    bins, places = torch.empty_like(keys), torch.empty_like(keys, dtype=torch.int64)
    for shift, width in _DIGITS:
        size = 1 << width
        # Bin 0 is for smaller keys, which are counted already, the last bin for larger ones.
        torch.bitwise_right_shift(keys, shift, out=bins).sub_(found << width).clamp_(-1, size).add_(1)
        histogram = torch.zeros(len(keys), size + 2, dtype=torch.int64, device=keys.device)
        sums = histogram.scatter_add_(1, places.copy_(bins), weights)[:, 1:-1].cumsum(-1)
        place = torch.searchsorted(sums, missing).clamp_(max=size - 1)
        missing = missing - torch.where(place > 0, sums.gather(-1, (place - 1).clamp_(min=0)), 0)
        found = (found << width) + place.int()
    return -found.view(torch.float32).squeeze(-1)
