"""The two rules by which drafts are judged: what they accept, and that the law of the tokens stays the target's."""

import math

import pytest
import torch
from torch import Tensor

from deepinfer.sampling.weights import pick
from deepinfer.speculative.acceptance import accepted_counts, is_accepted, residual

GRID = 4000  # equally spaced random numbers: integrals over [0, 1) to about 1 / GRID


def log_weights(*shares: float) -> Tensor:
    largest = max(shares)
    return torch.tensor([[math.log(share / largest) if share else -math.inf for share in shares]])


def law(p: Tensor, q: Tensor) -> Tensor:
    """The exact law of the token that drafting from q and judging by p gives, integrated over all random numbers."""
    numbers = (torch.arange(GRID, dtype=torch.float64) + 0.5) / GRID
    shares, result = q.double().softmax(-1)[0], torch.zeros(p.shape[-1], dtype=torch.float64)
    others = pick(residual(p, q).expand(GRID, -1).contiguous(), numbers).bincount(minlength=p.shape[-1]) / GRID
    for token, share in enumerate(shares.tolist()):
        if share:
            drafts = torch.full((GRID,), token)
            accepted = is_accepted(drafts, p.expand(GRID, -1), q.expand(GRID, -1), numbers).double().mean()
            result[token] += share * accepted
            result += share * (1 - accepted) * others
    return result


@pytest.mark.parametrize(
    ("p", "q"),
    [
        ((0.7, 0.3), (0.5, 0.5)),
        ((0.1, 0.2, 0.3, 0.4), (0.4, 0.3, 0.2, 0.1)),
        ((0.5, 0.5, 0, 0), (0.25, 0.25, 0.25, 0.25)),  # a cut-off of the target's that the drafter lacks
        ((0.25, 0.25, 0.25, 0.25), (0, 0, 1, 0)),  # a draft that was not drawn at random
        ((0, 0, 1, 0), (0.25, 0.25, 0.25, 0.25)),
        ((0.3, 0.3, 0.4), (0.3, 0.3, 0.4)),
        ((0.999, 0.001, 0), (0, 0.001, 0.999)),
    ],
)
def test_rejection_keeps_the_law(p: tuple[float, ...], q: tuple[float, ...]) -> None:
    target, drawn = log_weights(*p), log_weights(*q)
    torch.testing.assert_close(law(target, drawn), torch.tensor(p, dtype=torch.float64), atol=2 / GRID, rtol=0)


def test_the_share_accepted_is_the_overlap() -> None:
    p, q = log_weights(0.1, 0.2, 0.7), log_weights(0.3, 0.3, 0.4)
    numbers = (torch.arange(GRID, dtype=torch.float64) + 0.5) / GRID
    shares = [
        is_accepted(torch.full((GRID,), token), p.expand(GRID, -1), q.expand(GRID, -1), numbers).double().mean().item()
        for token in range(3)
    ]
    assert sum(a * b for a, b in zip(shares, (0.3, 0.3, 0.4), strict=True)) == pytest.approx(0.1 + 0.2 + 0.4, abs=1e-3)


def test_a_draft_that_could_not_be_drawn_is_rejected() -> None:
    p, q = log_weights(0.5, 0.5), log_weights(1, 0)
    accepted = is_accepted(torch.tensor([1, -1, 0]), p.expand(3, -1), q.expand(3, -1), torch.zeros(3).double())
    assert accepted.tolist() == [False, False, True]


def test_equal_laws_leave_no_residual_but_the_target() -> None:
    p = log_weights(0.2, 0.8)
    assert pick(residual(p, p), torch.tensor([0.1], dtype=torch.float64)).item() == 0
    assert pick(residual(p, p), torch.tensor([0.3], dtype=torch.float64)).item() == 1


def test_accepted_drafts_are_a_prefix_of_those_verified() -> None:
    agrees = torch.tensor([[1, 1, 1], [1, 0, 1], [0, 1, 1], [1, 1, 1], [1, 1, 1]]).bool()
    drafted = torch.tensor([3, 3, 3, 2, 0])
    assert accepted_counts(agrees, drafted).tolist() == [3, 1, 0, 2, 0]
