"""Layouts of ranks: what follows from what is given, and what cannot be."""

from dataclasses import replace
from typing import Any

import pytest

from deepinfer.config.envs import read_environment
from deepinfer.core.errors import ConfigError
from deepinfer.parallel.spread import Job, Spreader
from deepinfer.parallel.topology import Topology, choose_topology

ALONE = read_environment({})
TWO_NODES = replace(ALONE, nodes=2, launcher=1)
TORCHRUN = replace(ALONE, nodes=4, launcher=3, launcher_on_node=3, launchers_on_node=4)

GOOD: dict[str, tuple[dict[str, Any], Topology]] = {
    "nothing asked": ({}, Topology()),
    "nothing asked, many devices": ({"devices": 8}, Topology()),
    "experts over all": ({"ep": 4}, Topology(4, 4)),
    "groups": ({"dp": 2}, Topology(2, 2)),
    "replicas": ({"dp": 2, "ep": 1}, Topology(1, 2)),
    "prompts over two": ({"ep": 8, "cp": 2}, Topology(8, 4, 2)),
    "prompts alone": ({"cp": 2, "devices": 8}, Topology(2, 1, 2)),
    "prompts, nothing else shared": ({"cp": 2, "ep": 1}, Topology(1, 1, 2)),
    "all three": ({"dp": 2, "cp": 3}, Topology(6, 2, 3)),
    "prompts under torchrun": ({"environment": TORCHRUN, "cp": 2}, Topology(4, 2, 2, 4, 1)),
    "both": ({"ep": 8, "dp": 8, "devices": 8}, Topology(8, 8)),
    "one": ({"ep": 1, "devices": 0}, Topology()),
    "two nodes of CPUs": ({"environment": TWO_NODES}, Topology(2, 2, 1, 2, 2)),
    "two nodes of eight": ({"environment": TWO_NODES, "devices": 8}, Topology(16, 16, 1, 2, 2)),
    "half of two nodes": ({"environment": TWO_NODES, "devices": 8, "ep": 8}, Topology(8, 8, 1, 2, 2)),
    "torchrun": ({"environment": TORCHRUN, "devices": 4}, Topology(4, 4, 1, 4, 1)),
    "replicas under torchrun": ({"environment": TORCHRUN, "ep": 1, "dp": 4}, Topology(1, 4, 1, 4, 1)),
}

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "cp that does not divide": ({"ep": 4, "cp": 3}, r"cp is 3; it must divide ep, which is 4"),
    "cp under torchrun that does not divide": ({"environment": TORCHRUN, "cp": 3}, r"cp is 3; it must divide ep.* 4"),
    "cp over too few devices": ({"cp": 4, "devices": 2}, r"4 ranks need 4 devices.*sees 2"),
    "cp that is not shared by all": ({"ep": 2, "dp": 2, "cp": 2}, r"ep is 2; it takes dp x cp = 4"),
    "some share": ({"ep": 2, "dp": 4}, r"ep is 2; it takes dp x cp = 4 \(experts are shared by all ranks\), or 1"),
    "too few devices": ({"ep": 4, "devices": 2}, r"4 ranks need 4 devices.*sees 2: ep is at most.* = 2; set CUDA_VIS"),
    "no device": ({"ep": 2, "devices": 0}, r"2 ranks need 2 devices a launcher, which sees 0"),
    "odd ranks on two nodes": ({"environment": TWO_NODES, "ep": 3}, r"3 ranks cannot be shared evenly by 2 launchers"),
    "no number": ({"environment": replace(ALONE, nodes=2)}, r"WORLD_SIZE is 2, but RANK is unset"),
    "a number too high": ({"environment": replace(ALONE, nodes=2, launcher=2)}, r"RANK 2: they take"),
    "uneven nodes": ({"environment": replace(TORCHRUN, launchers_on_node=3)}, r"LOCAL_WORLD_SIZE 3"),
}


def choose(
    ep: int | None = None, dp: int | None = None, cp: int = 1, devices: int | None = None, **given: Any
) -> Topology:
    return choose_topology(ep, dp, cp, given.get("environment", ALONE), devices)


@pytest.mark.parametrize("case", GOOD)
def test_layouts(case: str) -> None:
    asked, expected = GOOD[case]
    found = choose(**asked)
    assert found == expected
    assert found.local * found.launchers == found.ranks


@pytest.mark.parametrize("case", BAD)
def test_impossible_layouts(case: str) -> None:
    asked, message = BAD[case]
    with pytest.raises(ConfigError, match=message):
        choose(**asked)


def job(tokens: int, new: int = 10, start: int = 0) -> Job:
    return Job(range(start, start + tokens), new)


def test_equal_requests_go_round() -> None:
    chosen = Spreader(4, 8).spread([job(100, start=1000 * number) for number in range(12)])
    assert sorted(chosen) == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3


def test_long_requests_are_evened_out_by_short_ones() -> None:
    chosen = Spreader(2, 8).spread([job(900, 1), *(job(100, 1, start=2000 + 500 * number) for number in range(8))])
    assert chosen[0] not in chosen[1:]


def test_requests_go_where_their_beginning_was_read() -> None:
    spreader = Spreader(2, 8)
    families = [range(0, 400), range(1000, 1400)]
    first = spreader.spread([Job([*family], 4) for family in families])
    assert sorted(first) == [0, 1]
    later = [Job([*families[place % 2], *range(5000 + 100 * place, 5020 + 100 * place)], 4) for place in range(8)]
    assert spreader.spread(later) == [first[place % 2] for place in range(8)]


def test_a_shared_beginning_does_not_leave_ranks_idle() -> None:
    """All requests begin alike, but the rest of each is longer: both ranks read the beginning."""
    together = [Job([*range(64), *range(1000 * place, 1000 * place + 200)], 50) for place in range(1, 9)]
    assert sorted(Spreader(2, 8).spread(together)) == [0] * 4 + [1] * 4


def test_only_so_many_pages_are_remembered() -> None:
    spreader = Spreader(1, 8, remembered=3)
    spreader.spread([job(80)])
    assert len(spreader._known[0]) == 3


def test_no_requests_and_short_ones() -> None:
    assert Spreader(3, 8).spread([]) == []
    assert sorted(Spreader(3, 8).spread([job(1), job(2), job(3)])) == [0, 1, 2]
