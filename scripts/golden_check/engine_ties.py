"""Shows whether rows in which the engine differs from what is expected come from ties.

Golden values were made with `torch.topk` over whole rows of index scores, whose choice among equal scores depends on
the length of the row; an engine that runs chunks takes the lowest position. Such a difference is excused only when it
is shown that the reference gives the engine's values if it takes the lowest position, too, that it gives the golden
ones if it takes what `torch.topk` takes, and that the two runs part at scores which are exactly equal. Ties in
rounding the window KV, on either side, are shown as for the reference itself, see `ties`.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from deepinfer.reference import indexer
from deepinfer.reference.attention import Attention
from deepinfer.reference.indexer import Ties
from deepinfer.reference.model import ReferenceModel
from golden_check.compare import Group, errors, failing
from golden_check.data import Golden
from golden_check.ties import explain

CLOSE = 1e-4  # how well the scores of two runs agree that have read the same entries so far

Values = Mapping[str, Tensor]


@dataclass(frozen=True)
class EngineGroup(Group):
    """Values that the engine computes; `reference` computes them with ties of index scores broken as it is told."""

    reference: Callable[[Ties], Values] = field(kw_only=True)
    golden: Golden = field(kw_only=True)

    def against(self, values: Values, ties: Ties) -> Group:
        """The reference, with these ties, held to `values`."""
        return Group(self.case, values, partial(self.reference, ties), self.limit, self.by_median)


@contextmanager
def breaking_ties(model: ReferenceModel, ties: Ties) -> Iterator[None]:
    """Within the block the model breaks ties of index scores like this."""
    before = [layer.attn.ties for layer in model.layers]
    for layer in model.layers:
        layer.attn.ties = ties
    try:
        yield
    finally:
        for layer, kept in zip(model.layers, before, strict=True):
            layer.attn.ties = kept


@dataclass(frozen=True)
class Choice:
    """One choice of the best in an index layer, of entries or of blocks of them.

    scores: FP32 [R, S], -inf where not allowed. chosen: bool [R, S].
    """

    layer: int
    scores: Tensor
    chosen: Tensor


def explain_engine(group: EngineGroup, actual: Values) -> str:
    """The ties that explain why the engine's `actual` values differ, in words; empty if they do not explain it all."""
    parts = []
    lowest, our_choices = _run(group, Ties.LOWEST)
    topk, their_choices = _run(group, Ties.TOPK)
    if failing(group, errors(group, lowest)):
        part = parting(our_choices, their_choices)
        if not part:
            return ""
        error = max(rows.max().item() for rows in errors(group.against(actual, Ties.LOWEST), lowest).values())
        parts.append(f"{part}: error {error:.0e} if the reference takes the lowest, too")
    sides = ((group.against(group.expected, Ties.TOPK), topk), (group.against(actual, Ties.LOWEST), lowest))
    for side, values in sides:
        failures = failing(side, errors(side, values))
        tie = explain(side, failures) if failures and not side.by_median else ""
        if failures and not tie:
            return ""
        parts += [tie] if tie else []
    return "; ".join(parts)


def parting(lowest: list[Choice], topk: list[Choice]) -> str:
    """Where the reference that takes the lowest position and the one that asks `torch.topk` first choose differently.

    Empty unless all that the one chooses and the other does not has exactly the same score.
    """
    for ours, theirs in zip(lowest, topk, strict=True):
        rows = torch.nonzero((ours.chosen != theirs.chosen).any(-1)).flatten().tolist()
        if rows:
            return _parted(ours, theirs, rows)
    return ""


def _parted(ours: Choice, theirs: Choice, rows: list[int]) -> str:
    """All rows of the first differing choice must differ by a tie in either run; the first of them is named.

    Up to there the two runs read the same entries, but not in the same order: their scores differ in the last bits.
    """
    if not torch.allclose(ours.scores, theirs.scores, rtol=CLOSE, atol=CLOSE):
        return ""
    for row in rows:
        moved = ours.chosen[row] != theirs.chosen[row]
        if any(len(choice.scores[row][moved].unique()) != 1 for choice in (ours, theirs)):
            return ""
    row = rows[0]
    score = ours.scores[row][ours.chosen[row] & ~theirs.chosen[row]][0]
    tied = ours.scores[row] == score
    counts = f"{int((tied & ours.chosen[row]).sum())} of {int(tied.sum())}"
    return f"index layer {ours.layer}, row {row}, {counts} entries of equal score {score.item():.3g}"


def _run(group: EngineGroup, ties: Ties) -> tuple[Values, list[Choice]]:
    """What the reference computes with these ties, and every choice it makes, in their order."""
    numbers = {id(layer.attn): number for number, layer in enumerate(group.golden.model.layers)}
    best, select = indexer.best, Attention.select
    found: list[Choice] = []
    layer = -1

    def recorded_select(attention: Attention, *arguments: object) -> object:
        nonlocal layer
        layer = numbers[id(attention)]
        return select(attention, *arguments)  # type: ignore[arg-type]

    def recorded_best(scores: Tensor, count: int, rule: Ties) -> tuple[Tensor, Tensor]:
        values, indices = best(scores, count, rule)
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, indices, values > -torch.inf)
        found.append(Choice(layer, scores[0], chosen[0]))
        return values, indices

    indexer.best, Attention.select = recorded_best, recorded_select  # type: ignore[method-assign, assignment]
    try:
        return group.reference(ties), found
    finally:
        indexer.best, Attention.select = best, select  # type: ignore[method-assign]
