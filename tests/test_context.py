"""Balanced context parallel: how rows are cut, and that ranks which share a step give what one process gives."""

import random
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from model_rig import Player, rig_of, text
from random_models import VARIANTS
from rank_threads import run_ranks
from released_config import released

from deepinfer.config.model import ModelConfig
from deepinfer.core.batch import Batch
from deepinfer.core.plan import Span
from deepinfer.model.model import InferenceModel
from deepinfer.ops.rows import torch as operators
from deepinfer.parallel import context
from deepinfer.parallel.collectives import Collectives
from deepinfer.parallel.context import RowWork, cut_rows, is_shared, share_rows

CLOSE = 2e-4


class SharingPlayer(Player):
    """One rank of a group: the same requests, and of each step a part."""

    group: Collectives
    shared, decoders = 0, 0

    def part_of(self, batch: Batch, spans: Sequence[Span]) -> Batch:
        if not is_shared(spans, self.group.size):
            return batch
        self.shared += 1
        rings = self.caches.ring, self.caches.pairs.shape[2]
        mine = share_rows(batch, spans, RowWork(self.model.config), rings, self.group)
        assert mine.shared is not None
        self.decoders += mine.shared.decoder is not None
        return mine


def model_of(variant: str, by_rows: bool) -> InferenceModel:
    rig = rig_of(variant)
    config = rig.model.config
    classes = [token % max(config.engram_compressed_vocab_size, 1) for token in range(config.vocab_size)]
    ops = operators if by_rows else None
    return InferenceModel(config, rig.model.weights, classes if config.engram_layer_ids else None, ops)


def play(player: Player, variant: str) -> list[torch.Tensor]:
    """The logits of all rows of several requests, in steps of every size; the same for every player."""
    rig, chance = rig_of(variant), random.Random(variant)
    lengths = [(150, "off"), (83, "compact"), (201, "mask"), (9, "off")]
    numbers = [player.add(text(rig, length, seed=length), mode, length // 2) for length, mode in lengths]
    while left := {n: rest for n in numbers if (rest := len(player.requests[n].ids) - player.requests[n].done)}:
        chosen = [number for number in left if chance.random() < 0.7] or list(left)
        player.step({number: min(left[number], chance.choice([1, 1, 2, 33, 64, 131])) for number in chosen})
    return [torch.stack(list(player.requests[number].logits.values())) for number in numbers]


RUNS = [("all parts", 2, False), ("all parts", 3, True), ("two ratio-2 sources", 2, False),
        ("candidates of pairs", 3, True)]  # fmt: skip
MORE_RUNS = [("two ratio-2 sources", 3, True), ("candidates of pairs", 2, False), ("no Engram", 2, False),
             ("no Engram", 3, True)]  # fmt: skip


@pytest.mark.parametrize(
    ("variant", "ranks", "by_rows"), [*RUNS, *(pytest.param(*run, marks=pytest.mark.slow) for run in MORE_RUNS)]
)
def test_ranks_give_the_logits_of_one(ranks: int, variant: str, by_rows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In steps that share the encoder half, as a rule both halves, or none."""
    assert variant in VARIANTS
    monkeypatch.setattr(context, "LEAST_ROWS", 20)
    model, sizes = model_of(variant, by_rows), {"slots": 4, "page_size": 8, "pages": 80, "verify_rows": 4, "seed": 1}

    def work(group: Collectives) -> tuple[list[torch.Tensor], Player]:
        player = SharingPlayer(model, **sizes)
        player.group = group
        made = play(player, variant)
        assert player.shared > 2
        assert player.decoders > 1
        return made, player

    alone = Player(model, **sizes)
    wanted = play(alone, variant)
    results = run_ranks(ranks, work)
    for made, player in results:
        differences = torch.cat([(a - b).abs().amax(-1) for a, b in zip(made, wanted, strict=True)])
        assert differences.median() < CLOSE
        assert (differences < CLOSE).float().mean() > 0.8
        # Whatever steps leave is on every rank: but for sums in another order, just what one process has.
        for mine, first, other in zip(*map(stored, (player, results[0][1], alone)), strict=True):
            assert (mine != other).sum() <= 0.02 * mine.numel()
            assert torch.equal(mine, first)
        assert torch.equal(player.caches.pairs.nan_to_num(), results[0][1].caches.pairs.nan_to_num())


def stored(player: Player) -> list[torch.Tensor]:
    caches = player.caches
    return [*caches.latents, *caches.index_keys, caches.windows, caches.history]


def span(slot: int, first: int, count: int, known: bool = True) -> Span:
    return Span(slot, slot, first, count, (0,) * count if known else None, 0, 0, 0, 0, False)


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[Span], int]:
    """Prompts of any sizes at any positions, and rows that decode."""
    count = st.integers(1, 300) | st.integers(300, 9000)
    sizes = draw(st.lists(st.tuples(st.integers(0, 1 << 20), count), max_size=6))
    prompts = [span(slot, first, rows) for slot, (first, rows) in enumerate(sizes)]
    decoding = draw(st.lists(st.tuples(st.integers(1, 1 << 20), st.integers(1, 6)), max_size=9))
    others = [span(len(prompts) + slot, first, rows, False) for slot, (first, rows) in enumerate(decoding)]
    return draw(st.permutations([*others, *prompts])), draw(st.integers(2, 8))


WORK = RowWork(ModelConfig.from_dict(released(), "released"))


@given(steps())
def test_every_row_runs_once_and_pairs_stay_whole(step: tuple[list[Span], int]) -> None:
    spans, ranks = step
    shares = cut_rows(spans, ranks, WORK)
    assert len(shares) == ranks
    pieces: dict[int, list[Span]] = {number: [] for number in range(len(spans))}
    for number, piece in (one for share in shares for one in share):
        pieces[number].append(piece)
    for number, cut in pieces.items():
        ordered = sorted(cut, key=lambda piece: piece.first)
        assert ordered[0].first == spans[number].first
        assert ordered[-1].end == spans[number].end
        assert all(one.end == other.first for one, other in pairwise(ordered))
        assert all(piece.first % 2 == 0 for piece in ordered[1:])
        assert all(piece.count for piece in ordered)
        if spans[number].token_ids is None:
            assert ordered == [spans[number]]  # drafts are judged together


@given(steps())
def test_no_rank_has_much_more_work_than_another(step: tuple[list[Span], int]) -> None:
    """Than the mean, by no more than the largest stretch that is not cut, and four rows of each that is."""
    spans, ranks = step
    shares = cut_rows(spans, ranks, WORK)
    loads = [sum(cost(piece) for _, piece in share) for share in shares]
    cut = [one for one in spans if not any(one is piece for share in shares for _, piece in share)]
    whole = max([cost(one) for one in spans if one not in cut], default=0)
    rounding = sum(4 * WORK.total(one.end, one.end + 1) for one in cut)
    assert max(loads) <= sum(loads) / ranks + whole + rounding


def cost(one: Span) -> int:
    return WORK.total(one.first, one.end)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize(("first", "count"), [(0, 8192), (0, 131072), (1 << 20, 8192), (4095, 3001)])
def test_rows_and_work_are_both_equal(ranks: int, first: int, count: int) -> None:
    shares = cut_rows([span(0, first, count)], ranks, WORK)
    rows = [sum(piece.count for _, piece in share) for share in shares]
    loads = [sum(int(WORK(np.arange(one.first, one.end)).sum()) for _, one in share) for share in shares]
    assert max(rows) <= 1.005 * count / ranks
    assert max(loads) <= 1.005 * sum(loads) / ranks


@pytest.mark.parametrize(
    ("spans", "shared"),
    [
        ([span(0, 0, 31)], False),
        ([span(0, 0, 32)], True),
        ([span(0, 40, 64, False)], False),
        ([span(0, 40, 1, False), span(1, 7, 40)], True),
    ],
    ids=["short", "long enough", "decoding", "both"],
)
def test_what_is_shared(spans: list[Span], shared: bool) -> None:
    assert is_shared(spans, 2) is shared


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool], ids=str)
def test_exchanges_of_a_group(dtype: torch.dtype) -> None:
    """Rows of any kind, of ranks with many, one and none; what the first tells all."""

    def work(group: Collectives) -> list[object]:
        rows = torch.arange(3 * [4, 1, 0][group.rank]).view(-1, 3).to(dtype)
        gathered = group.gather(rows, 4)
        told = torch.arange(6).view(2, 3).to(dtype) if group.rank == 0 else torch.zeros(2, 3, dtype=dtype)
        group.spread(told)
        messages = [b"", b"short", b"x" * ((1 << 14) - 8), b"y" * ((1 << 14) - 7), b"long " * 10000]
        told_messages = [group.tell(message if group.rank == 0 else None) for message in messages]
        empty = group.gather(rows[:0], 2).shape
        return [
            gathered[:4].tolist(),
            gathered[4:5].tolist(),
            told.tolist(),
            told_messages == messages,
            tuple(empty),
            gathered.shape[0],
        ]

    whole, told = torch.arange(12).view(4, 3).to(dtype), torch.arange(6).view(2, 3).to(dtype)
    wanted = [whole.tolist(), whole[:1].tolist(), told.tolist(), True, (6, 3), 12]
    assert run_ranks(3, work) == [wanted] * 3
