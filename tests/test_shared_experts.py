"""Experts on many ranks against the same experts on one: equal to the bit where the operators' rows are independent."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from random_models import tiny
from rank_threads import run_ranks
from torch import Tensor

from deepinfer.checkpoint.random import RandomCheckpoint
from deepinfer.config.model import ModelConfig
from deepinfer.model.experts import ExpertLoads
from deepinfer.model.loading import Form, load_routed
from deepinfer.model.weights import EngramWeights, ExpertWeights
from deepinfer.ops.choice import batch_invariant
from deepinfer.ops.experts import routed_experts
from deepinfer.parallel.balancer import Balancer
from deepinfer.parallel.collectives import Collectives
from deepinfer.parallel.experts import ExpertTable, SharedExperts
from deepinfer.parallel.placement import Placement, balanced_placement, first_placement
from deepinfer.parallel.tables import SharedTables

EXPERTS, HIDDEN, LIMIT, LAYER = 6, 64, 7.0, 1
ROWS = ((5, 0, 3, 9), (0, 0, 1, 0), (0, 0, 0, 0), (33, 17, 2, 8))
CPU = torch.device("cpu")


@dataclass(frozen=True)
class World:
    checkpoint: RandomCheckpoint
    dtype: torch.dtype
    keep: bool

    def weights(self, held: list[int]) -> ExpertWeights:
        w13, w2 = load_routed(self.checkpoint, LAYER, held, Form(self.dtype, CPU, self.keep))
        nothing = torch.empty(0)
        return ExpertWeights(nothing, nothing, nothing, w13, w2, nothing, nothing)

    def visits(self, rank: int, rows: int, count: int = 2) -> tuple[Tensor, Tensor, Tensor]:
        source = torch.Generator().manual_seed(rank)
        h = torch.randn(rows, HIDDEN, generator=source).to(self.dtype)
        chosen = (
            torch.rand(rows, EXPERTS, generator=source).topk(count).indices if rows else torch.empty(0, count).long()
        )
        return h, chosen, torch.rand(rows, count, generator=source)


@pytest.fixture(scope="module", params=["float32", "bfloat16", "quantised"])
def world(request: Any) -> World:
    checkpoint = RandomCheckpoint(ModelConfig.from_dict(tiny(), "test"))
    dtype = torch.float32 if request.param == "float32" else torch.bfloat16
    return World(checkpoint, dtype, request.param == "quantised")


def one_by_one(world: World, h: Tensor, chosen: Tensor, routing: Tensor) -> Tensor:
    """All experts in one place; each row by itself, so that no product depends on what else is in it."""
    weights = world.weights(list(range(EXPERTS)))
    rows = [
        routed_experts(h[row : row + 1], chosen[row : row + 1], routing[row : row + 1], weights.w13, weights.w2, LIMIT)
        for row in range(len(h))
    ]
    return torch.cat(rows) if rows else h


@pytest.mark.parametrize("rows", ROWS, ids=str)
@pytest.mark.parametrize("extra", [0, 4])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_any_rows_on_any_ranks(world: World, ranks: int, extra: int, rows: tuple[int, ...]) -> None:
    placement = first_placement(EXPERTS, extra if ranks > 1 else 0, ranks)

    def work(collectives: Collectives) -> float:
        rank = collectives.rank
        shared = SharedExperts(ExpertTable(placement, EXPERTS, CPU), collectives)
        h, chosen, routing = world.visits(rank, rows[rank])
        finish = shared(h, chosen, routing, world.weights(placement.experts[rank].tolist()), LIMIT)
        got, wanted = finish(), one_by_one(world, h, chosen, routing)
        assert got.shape == wanted.shape
        assert got.dtype == wanted.dtype
        return float((got.float() - wanted.float()).abs().max()) if len(got) else 0.0

    tolerance = 1e-5 if world.dtype is torch.float32 else 0.02
    assert max(run_ranks(ranks, work)) <= tolerance


@pytest.mark.parametrize("extra", [0, 4])
def test_batch_invariant_operators_give_the_bits_of_one_process(world: World, extra: int) -> None:
    rows, ranks = (13, 0, 4), 3
    placement = first_placement(EXPERTS, extra, ranks)

    def work(collectives: Collectives) -> bool:
        rank = collectives.rank
        shared = SharedExperts(ExpertTable(placement, EXPERTS, CPU), collectives)
        everything = world.weights(list(range(EXPERTS)))
        h, chosen, routing = world.visits(rank, rows[rank], 4)
        with batch_invariant():
            got = shared(h, chosen, routing, world.weights(placement.experts[rank].tolist()), LIMIT)()
            wanted = routed_experts(h, chosen, routing, everything.w13, everything.w2, LIMIT)
        return torch.equal(got, wanted)

    assert all(run_ranks(ranks, work))


def test_where_an_expert_lies_changes_no_bit(world: World) -> None:
    """One row a rank, so that products are of one row wherever they are made: the same bits for any placement."""
    placements = [
        first_placement(EXPERTS, 0, 3),
        balanced_placement(np.array([9.0, 1, 1, 1, 1, 5]), 12, 3),
        Placement(np.array([[5, 4], [3, 2], [1, 0]])),
    ]
    ends = []
    for placement in placements:

        def work(collectives: Collectives, placement: Placement = placement) -> Tensor:
            shared = SharedExperts(ExpertTable(placement, EXPERTS, CPU), collectives)
            weights = world.weights(placement.experts[collectives.rank].tolist())
            h, chosen, routing = world.visits(collectives.rank, 1, 4)
            chosen = (chosen.sort().values + 2 * collectives.rank) % EXPERTS  # no expert gets two rows of one rank
            if collectives.rank:
                h, chosen, routing = h[:0], chosen[:0], routing[:0]
            return shared(h, chosen, routing, weights, LIMIT)()

        ends.append(run_ranks(3, work)[0])
    h, chosen, routing = world.visits(0, 1, 4)
    alone = one_by_one(world, h, chosen.sort().values % EXPERTS, routing)
    assert all(torch.equal(end, alone) for end in ends)


@pytest.mark.parametrize("interval", [1, 3])
def test_experts_move_between_steps_and_nothing_changes(world: World, interval: int) -> None:
    """Loads are as uneven as can be; experts move layer by layer while steps go on, and results stay the same."""
    ranks, layers = 2, 2
    placement = Placement(np.array([[0, 1, 2, 3], [0, 1, 4, 5]]))
    hot = ((2, 3), (5, 4))  # of each layer, both on the same rank

    def work(collectives: Collectives) -> tuple[list[Tensor], int, list[Placement]]:
        rank = collectives.rank
        loads = ExpertLoads(layers, EXPERTS, CPU)
        tables = [ExpertTable(placement, EXPERTS, CPU) for _ in range(layers)]
        held = [world.weights(placement.experts[rank].tolist()) for _ in range(layers)]
        shared: list[Callable[..., Any]] = [
            loads.counted(layer, SharedExperts(table, collectives)) for layer, table in enumerate(tables)
        ]

        def read(layer: int, wanted: Any) -> Any:
            return load_routed(world.checkpoint, LAYER, wanted, Form(world.dtype, CPU, world.keep))

        balancer = Balancer(tables, held, loads, collectives, read, interval, 1)
        h, _, routing = world.visits(rank, 1)
        results = []
        for step in range(40):
            balancer.between_steps(-collectives.most([-balancer.ready])[0], True)
            for layer in range(layers):
                chosen = torch.tensor([[hot[layer][step % 2], hot[layer][(step + 1) % 2]]])
                results.append(shared[layer](h, chosen, routing, held[layer], LIMIT)())
        return results, balancer.moved, [table.placement for table in tables]

    (first, moved, placements), (second, also, same) = run_ranks(ranks, work)
    assert moved == also >= 2
    for one, other in zip(placements, same, strict=True):
        assert (one.experts == other.experts).all()
    for layer, placed in enumerate(placements):
        loads = np.bincount(hot[layer], minlength=EXPERTS).astype(np.float64)
        assert placed.imbalance(loads) == 1 < placement.imbalance(loads)
    for results in (first, second):  # the choices repeat every two steps, two layers each
        for place, result in enumerate(results[4:], 4):
            assert (result.float() - results[place % 4].float()).abs().max() <= (1e-6 if not world.keep else 0.02)


def test_a_rank_that_leaves_ends_the_others_exchange() -> None:
    def work(collectives: Collectives) -> str:
        collectives.most([1])
        if collectives.rank == 1:
            collectives.abort()
            return "left"
        with pytest.raises(RuntimeError):
            collectives.swap(torch.zeros(3, 2, dtype=torch.int64))
        collectives.abort()
        return "told"

    assert run_ranks(3, work) == ["told", "left", "told"]


def test_rows_take_the_copies_of_an_expert_in_turn() -> None:
    table = ExpertTable(Placement(np.array([[0, 1], [0, 2], [3, 0]])), 4, CPU)
    ranks, slots = table.find(torch.tensor([[0, 3]] * 6), 1)
    assert ranks.tolist() == [[1, 2], [2, 2], [0, 2], [1, 2], [2, 2], [0, 2]]
    assert slots.tolist() == [[0, 0], [1, 0], [0, 0], [0, 0], [1, 0], [0, 0]]
    table.update(Placement(np.array([[1, 0], [3, 2], [3, 1]])))
    ranks, slots = table.find(torch.tensor([[0, 3]] * 2), 0)
    assert (ranks.tolist(), slots.tolist()) == ([[0, 1], [0, 2]], [[1, 0], [1, 0]])


def test_rows_of_tables_come_from_the_ranks_that_hold_them() -> None:
    """Two tables of other sizes than the ranks divide, asked for all over, in part by nobody."""
    sizes, ranks = (29, 7), 4
    source = torch.Generator().manual_seed(0)
    whole = [torch.randint(0, 256, (size, 40), generator=source).to(torch.uint8) for size in sizes]

    def work(collectives: Collectives) -> bool:
        rank, layers = collectives.rank, []
        for table in whole:
            each = -(-len(table) // ranks)
            part = table[rank * each : (rank + 1) * each]
            layers.append(EngramWeights(part[:, :32], part[:, 32:], *[torch.empty(0)] * 2, None))  # type: ignore[arg-type]
        tables = SharedTables(layers, sizes, collectives)
        if rank == 3:
            tables.stand_by()
            return True
        own = torch.Generator().manual_seed(rank)
        wanted = [torch.randint(0, size, (50 * rank,), generator=own) for size in sizes]
        read = [torch.cat(part, 1) for part in tables(wanted)]
        return all(torch.equal(part, table[rows]) for part, table, rows in zip(read, whole, wanted, strict=True))

    assert all(run_ranks(ranks, work))
