"""Placement of experts: what must hold for any loads, and how even it gets."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.core.errors import ConfigError
from deepinfer.parallel.packing import pack
from deepinfer.parallel.placement import Placement, balanced_placement, first_placement, near
from deepinfer.parallel.replication import replicate, slot_count


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray, int, int]:
    """Loads of a few experts, ranks, and a number of extra experts that fits them."""
    experts, ranks = draw(st.integers(1, 12)), draw(st.integers(1, 8))
    loads = draw(st.lists(st.floats(0, 1e6, width=32), min_size=experts, max_size=experts))
    most = (experts - -(-experts // ranks)) * ranks
    extra = draw(st.integers(0, most))
    return np.array(loads, dtype=np.float64), extra, ranks


def check(placement: Placement, experts: int, slots: int) -> None:
    assert placement.experts.size == slots
    assert (placement.copies(experts) >= 1).all()
    assert all(len(set(rank)) == len(rank) for rank in placement.experts.tolist())


@given(cases(), st.integers(1, 4))
def test_every_expert_has_a_place_and_no_rank_has_one_twice(case: tuple[np.ndarray, int, int], nodes: int) -> None:
    loads, extra, ranks = case
    slots = slot_count(len(loads), extra, ranks)
    assert slots % ranks == 0
    assert slots >= len(loads) + extra
    placement = balanced_placement(loads, slots, ranks, nodes)
    check(placement, len(loads), slots)
    check(first_placement(len(loads), extra, ranks), len(loads), slots)
    assert placement.rank_loads(loads).sum() == pytest.approx(loads.sum())


def test_near_keeps_what_can_stay() -> None:
    present = Placement(np.array([[0, 1, 2], [3, 4, 5], [6, 7, 8]]))
    wanted = Placement(np.array([[8, 2, 6], [4, 1, 0], [5, 7, 3]]))
    assert near(wanted, present).experts.tolist() == [[0, 1, 4], [3, 7, 5], [6, 2, 8]]


@given(cases())
def test_near_is_the_same_placement(case: tuple[np.ndarray, int, int]) -> None:
    loads, extra, ranks = case
    slots = slot_count(len(loads), extra, ranks)
    wanted, present = balanced_placement(loads, slots, ranks), first_placement(len(loads), extra, ranks)
    moved = near(wanted, present)
    check(moved, len(loads), slots)
    assert moved.imbalance(loads) == pytest.approx(wanted.imbalance(loads))
    stays = near(present, present)
    assert (stays.experts == present.experts).all()


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=5), st.integers(0, 5))
def test_no_other_replication_leaves_the_busiest_copy_with_less(values: list[float], more: int) -> None:
    loads, slots = np.array(values), len(values) + more
    counts = replicate(loads, slots, most=slots)
    assert counts.sum() == slots
    ways = _compositions(more, len(values))
    best = min(max(load / (1 + extra) for load, extra in zip(values, way, strict=True)) for way in ways)
    assert (loads / counts).max() == pytest.approx(best)


def _compositions(total: int, parts: int) -> list[list[int]]:
    if parts == 1:
        return [[total]]
    return [[first, *rest] for first in range(total + 1) for rest in _compositions(total - first, parts - 1)]


@given(cases())
def test_packing_stays_within_the_bound_of_largest_first(case: tuple[np.ndarray, int, int]) -> None:
    """A rank never exceeds the mean by more than one copy of the largest load, when every rank has many places."""
    loads, _, ranks = case
    many = np.concatenate((loads, np.zeros(len(loads) * (ranks - 1))))  # places in abundance
    places = pack(many, np.arange(len(many)), ranks)
    assert many[places].sum(1).max() <= loads.sum() / ranks + loads.max() + 1e-6
    assert sorted(places.ravel().tolist()) == list(range(len(many)))


def test_one_hot_expert_is_shared_by_all_ranks() -> None:
    loads = np.array([97.0, 1, 1, 1])
    assert first_placement(4, 0, 4).imbalance(loads) == pytest.approx(3.88)
    placement = balanced_placement(loads, 8, 4)
    assert placement.copies(4)[0] == 4
    assert placement.imbalance(loads) < 1.05


def test_copies_stay_within_their_node() -> None:
    loads = np.array([8.0, 1, 1, 1, 7, 1, 1, 1])
    placement = balanced_placement(loads, 12, 4, nodes=2)
    check(placement, 8, 12)
    for half, other in ((placement.experts[:2], placement.experts[2:]), (placement.experts[2:], placement.experts[:2])):
        assert not set(half.ravel().tolist()) & set(other.ravel().tolist())
    assert placement.imbalance(loads) < first_placement(8, 4, 4).imbalance(loads)


def test_a_released_layer_comes_out_even() -> None:
    """384 experts with loads of a spread that trained routers have, 64 extra, 64 ranks."""
    loads = np.exp(np.random.default_rng(0).normal(0, 0.4, 384))
    placement = balanced_placement(loads, slot_count(384, 64, 64), 64)
    check(placement, 384, 448)
    assert placement.imbalance(loads) < 1.03 < first_placement(384, 0, 64).imbalance(loads)


def test_slots_are_whole_on_every_rank() -> None:
    assert slot_count(384, 0, 8) == 384
    assert slot_count(384, 33, 8) == 384 + 40
    assert slot_count(384, 0, 256) == 512
    with pytest.raises(ConfigError, match=r"5 extra experts are too many for 4 experts on 2 ranks.*takes 0 to 4"):
        slot_count(4, 5, 2)
    with pytest.raises(ConfigError, match="takes 0 to 0"):
        slot_count(4, 1, 1)


def test_idle_layers_are_even() -> None:
    assert first_placement(4, 2, 2).imbalance(np.zeros(4)) == 1
    check(balanced_placement(np.zeros(4), 6, 2), 4, 6)
