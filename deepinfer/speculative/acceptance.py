"""Which drafts the target accepts, and what comes in place of the first that it does not.

Two rules, both exact. By equality: the target's own choice at each row decides, and a draft is accepted where it is
that choice; so the tokens are those of decoding without drafts, greedy or drawn. By rejection: a draft x that was drawn
from q is accepted with the chance min(1, p(x) / q(x)), where p is what the target would draw from, and else gives way
to a draw from the residual max(p - q, 0); so the tokens have the target's distribution, and more drafts are accepted.

Letters: R requests, W most drafts of one, J drafts judged, V vocabulary.
"""

import torch
from torch import Tensor

from deepinfer.sampling.weights import whole_weights

_LEAST_RESIDUAL = 1e-8
"""Where less is left, p and q are the same but for rounding, and p itself is drawn from."""


def accepted_counts(agrees: Tensor, drafted: Tensor) -> Tensor:
    """How many drafts in a row are accepted: bool [R, W], and int64 [R], how many there are -> int64 [R]."""
    inside = torch.arange(agrees.shape[1], device=agrees.device) < drafted[:, None]
    return (agrees & inside).long().cumprod(1).sum(1)


def is_accepted(drafts: Tensor, p: Tensor, q: Tensor, numbers: Tensor) -> Tensor:
    """The rejection rule: bool [J].

    drafts: int64 [J]. p, q: log-weights FP32 [J, V] of the target and of what the drafts were drawn from, the largest
    of a row 0. numbers: FP64 [J], uniform in [0, 1) and used for nothing else.
    """
    places = drafts.clamp(min=0)[:, None]
    chance, drawn = (_shares(side).gather(1, places)[:, 0] for side in (p, q))
    return (numbers * drawn < chance) & (drawn > 0) & (drafts >= 0)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """Log-weights FP32 [R, V] of the token in place of a rejected draft; p, q [R, V] as for `is_accepted`."""
    target = _shares(p)
    left = (target - _shares(q)).clamp(min=0)
    chosen = torch.where(left.sum(-1, keepdim=True) > _LEAST_RESIDUAL, left, target)
    return (chosen / chosen.amax(-1, keepdim=True)).log().float()


def _shares(log_weights: Tensor) -> Tensor:
    """The shares FP64 [R, V] by which `pick` draws."""
    weights = whole_weights(log_weights)
    return weights.double() / weights.sum(-1, keepdim=True).double()
