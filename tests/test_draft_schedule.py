"""How many drafts are verified and whose, and that neither choice bends the law of the tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.speculative.schedule import FixedDrafts, Floats, ScheduledDrafts, best_total, share, share_on_device


@dataclass
class Table:
    """Times of 1, 2, ... rows; drafting costs as much whatever there is to draft for."""

    rows: Sequence[float]
    drafting: float = 0.0

    def verify(self, rows: Floats) -> Floats:
        return np.asarray(self.rows)[rows.astype(int) - 1]

    def draft(self, requests: int) -> float:
        return self.drafting


def test_the_best_total_is_the_best_of_all() -> None:
    chances = [[0.9, 0.5, 0.2], [0.8, 0.7, 0.6]]
    steps = Table([1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0, 5.0])  # rises at the 4th row and at the 8th
    tokens = 2 + np.cumsum([0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.2])
    speeds = tokens / np.array([1.0, 1.0, 2.0, 2.0, 2.0, 2.0, 5.0])
    best = best_total(chances, steps)
    assert best.total == speeds.argmax() == 1
    assert best.gain == pytest.approx(speeds.max() / (2 / 1.0))
    dear = best_total(chances, Table(steps.rows, drafting=10.0))
    assert dear.total == 5  # once a block is there, more of it pays
    assert dear.gain < 1


@given(
    st.lists(st.tuples(st.lists(st.floats(0, 1), min_size=4, max_size=4), st.integers(0, 4)), min_size=1, max_size=6),
    st.integers(0, 30),
)
def test_shares_are_prefixes_of_the_likeliest(requests: list[tuple[list[float], int]], total: int) -> None:
    chances = np.cumprod([block for block, _ in requests], axis=1)
    most = [count for _, count in requests]
    counts = share(chances, most, total)
    assert sum(counts) == min(total, sum(most))
    assert all(0 <= count <= limit for count, limit in zip(counts, most, strict=True))
    taken = [chances[r, k] for r, count in enumerate(counts) for k in range(count)]
    left = [chances[r, k] for r, count in enumerate(counts) for k in range(count, most[r])]
    assert not taken or not left or min(taken) >= max(left)


@given(
    st.lists(st.tuples(st.lists(st.sampled_from([0, 0.2, 0.5, 0.9, 1]), min_size=4, max_size=4), st.integers(0, 4)),
             min_size=1, max_size=6),
    st.floats(0, 1),
)  # fmt: skip
def test_the_device_shares_alike(requests: list[tuple[list[float], int]], part: float) -> None:
    """Ties too, and chances that rise in a block, as rounding may make them."""
    chances, most = np.array([block for block, _ in requests], dtype=np.float64), [count for _, count in requests]
    total = round(part * sum(most))
    found = share_on_device(torch.from_numpy(chances), torch.tensor(most), total)
    assert found.tolist() == share(chances, most, total)


def test_ties_go_by_place_then_by_request() -> None:
    assert share(np.ones((3, 2)), [2, 2, 2], 4) == [2, 1, 1]


# The counterexample of the DSpark paper: two drafts x1, x2 of a binary vocabulary, p = (0.7, 0.3), q = (0.5, 0.5).
TARGET, DRAFTED = (0.7, 0.3), (0.5, 0.5)
SPEEDS = Table([1 / 1, 1 / 0.5, 1 / 0.45])
FIRST = 0.8
Policy = Callable[[Sequence[float]], int]
"""How many drafts of the one request are verified, by their survival."""


def chance_of_a(policy: Policy) -> float:
    """The law of the first token, over all drafts, coins and residuals; c2 is 0.9 after A and 0 after B."""
    result = 0.0
    for first, second in product((0, 1), repeat=2):
        drawn = DRAFTED[first] * DRAFTED[second]
        verified = policy([FIRST, FIRST * (0.9 if first == 0 else 0.0)])
        if verified == 0:  # the first token is the target's own
            result += drawn * TARGET[0]
            continue
        accepted = min(1, TARGET[first] / DRAFTED[first])
        left = [max(p - q, 0) for p, q in zip(TARGET, DRAFTED, strict=True)]
        result += drawn * (accepted * (first == 0) + (1 - accepted) * left[0] / sum(left))
    return result


def test_the_papers_counterexample() -> None:
    """Choosing how many from the blocks at hand gives A 0.85; any number of the likeliest drafts gives it its 0.70."""
    biased = chance_of_a(lambda chances: best_total([chances], SPEEDS).total)
    assert biased == pytest.approx(0.85)
    for total in range(3):
        here = chance_of_a(lambda chances, total=total: share(np.array([chances]), [2], total)[0])
        assert here == pytest.approx(0.70)


class TestScheduledDrafts:
    def test_cheap_rows_are_all_verified(self) -> None:
        made = ScheduledDrafts(3, Table([1.0] * 20)).decide([[0.9, 0.8, 0.7], None])
        assert (made.depth, made.total, made.drafting, made.speculative) == (3, 6, True, True)

    def test_where_nothing_pays_there_are_no_blocks_but_a_look_now_and_then(self) -> None:
        policy = ScheduledDrafts(2, Table([float(rows) for rows in range(1, 20)], drafting=0.5))
        made = [policy.decide([[0.5, 0.2]] * 3) for _ in range(120)]
        assert 2 <= sum(one.drafting for one in made) <= 4
        for before, one in pairwise(made):
            assert before.drafting or one.total == 0, "there are no blocks to verify"

    def test_what_is_not_known_yet_counts_as_the_others_did(self) -> None:
        policy = ScheduledDrafts(2, Table([1.0 + 0.4 * rows for rows in range(20)]))
        assert policy.decide([None] * 2).total == 4
        for _ in range(60):
            policy.decide([[0.05, 0.01]] * 2)
        assert policy.decide([None] * 2).total == 0

    def test_drafts_that_fail_though_they_were_stated_to_hold_are_not_made_any_more(self) -> None:
        """Confidence can be wrong: what happened counts. Then hardly a block is drafted, and the loss is small."""
        table = Table([4.0 + 0.1 * rows for rows in range(40)], drafting=0.8)
        policy, spent = ScheduledDrafts(5, table), 0.0
        for _ in range(400):
            made = policy.decide([[0.9, 0.8, 0.7, 0.6, 0.5]] * 4)
            rows = 4 + (made.total or 0)
            spent += float(table.verify(np.array([rows]))[0]) + table.drafting * made.drafting
            each = (made.total or 0) // 4
            policy.judged([([0.9, 0.8, 0.7, 0.6, 0.5][:each], 0)] * 4)
        plain = 400 * float(table.verify(np.array([4]))[0])
        assert spent < plain / 0.95

    def test_drafts_that_hold_again_are_made_again(self) -> None:
        policy = ScheduledDrafts(2, Table([4.0 + 0.1 * rows for rows in range(40)], drafting=0.3))
        blocks = [[0.9, 0.8]] * 4
        for _ in range(40):
            if policy.decide(blocks).total:
                policy.judged([([0.9, 0.8], 0)] * 4)
        assert policy.decide(blocks).total == 0
        seen = [policy.decide(blocks) for _ in range(600)]
        assert seen[-1].total == 8
        for _ in range(40):
            policy.judged([([0.9, 0.8], 2)] * 4)
        assert policy.trust == pytest.approx(1, abs=0.05)

    def test_without_requests_that_decode_the_first_blocks_are_drafted(self) -> None:
        made = ScheduledDrafts(2, Table([1.0] * 9)).decide([])
        assert (made.total, made.drafting) == (0, True)


def test_fixed_drafts() -> None:
    made, none = FixedDrafts(3).decide([None]), FixedDrafts(0).decide([])
    assert (made.depth, made.total, made.drafting, made.speculative) == (3, None, True, True)
    assert (none.depth, none.drafting, none.speculative) == (0, False, False)
