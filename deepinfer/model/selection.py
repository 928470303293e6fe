"""Selection: which compressed entries the rows of a group attend to, made by index layers and reused after them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.config.model import ModelConfig
from deepinfer.core.batch import Group
from deepinfer.model.reading import LiveEntries
from deepinfer.ops.indexer import best_blocks, best_positions, block_positions, index_scores, row_scores

TERMS_CPU, TERMS = 1 << 21, 1 << 25
"""Most products of query heads and keys to hold at a time; more rows are taken in turn. On a CPU they should fit its
cache, elsewhere fill the device."""


@dataclass(frozen=True)
class Selection:
    """What an index layer leaves for the layers after it, for one group.

    far: [G, F, D], latents to choose from. chosen: int64 [G, n, K], places in `far`, -1 for none.
    blocks: int64 [G, n, B], ascending candidate blocks of each row, -1 for none; None where all blocks are candidates.
    """

    far: Tensor
    chosen: Tensor
    blocks: Tensor | None


@dataclass(frozen=True)
class Query:
    """The index queries of one group.

    q: [G, n, h, d], rotated and rounded. weights: [G, n, h], of the heads. positions: int64 [G, n].
    """

    q: Tensor
    weights: Tensor
    positions: Tensor

    def rows(self, first: int, last: int) -> "Query":
        """The same of some rows of every stretch."""
        return Query(self.q[:, first:last], self.weights[:, first:last], self.positions[:, first:last])


class Selector:
    """Selects for one index layer.

    Of equal scores the lowest position wins, whatever else is in the batch.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        self._count = config.index_topk
        self._block, self._budget = config.candidate_block_size, config.candidate_topk_blocks
        self._publishes = config.candidates_enabled and layer == config.candidate_source_layer_id
        self._within = config.selects_candidates(layer)

    def select(self, query: Query, group: Group, entries: LiveEntries, before: Selection | None) -> Selection:
        """Choose for every row of the group; `before` is the group's last selection from the same source."""
        blocks = before.blocks if before is not None and self._within else None
        live = entries.count(group)
        publishes = self._publishes and -(-live // self._block) > self._budget
        if live <= self._count and blocks is None and not publishes:
            chosen = self._all(query.positions, live, entries)
        else:
            chosen, blocks = self._best(query, group, entries, blocks, publishes)
        return Selection(*_latents(chosen, group, entries), blocks)

    def _all(self, positions: Tensor, live: int, entries: LiveEntries) -> Tensor:
        """Every visible entry, without scoring: [G, n, live]."""
        places = torch.arange(live, device=positions.device)
        return torch.where(places < entries.visible(positions)[..., None], places, -1)

    def _best(
        self, query: Query, group: Group, entries: LiveEntries, blocks: Tensor | None, publishes: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Positions [G, n, K], and blocks: fresh ones if this layer publishes them."""
        keys = entries.keys(group)
        terms = TERMS_CPU if keys.device.type == "cpu" else TERMS
        step = max(1, terms // max(1, keys.shape[0] * keys.shape[1] * query.q.shape[2]))
        chosen, kept = [], []
        for first in range(0, group.count, step):
            last = min(first + step, group.count)
            reach = max(1, (group.longest - group.count + last) // entries.ratio)  # entries these rows may see
            part, own = query.rows(first, last), None if blocks is None else blocks[:, first:last]
            visible = entries.visible(part.positions)
            scores, places = _scores(part, keys[:, :reach], visible, own, self._block)
            if publishes:
                kept.append(_padded(best_blocks(scores, visible, self._block, self._budget), self._budget, front=True))
            best = best_positions(scores, self._count)
            if places is not None:
                best = torch.where(best < 0, -1, places.gather(-1, best.clamp(min=0)))
            chosen.append(_padded(best, min(self._count, keys.shape[1])))
        return torch.cat(chosen, 1), torch.cat(kept, 1) if publishes else blocks


def _scores(
    query: Query, keys: Tensor, visible: Tensor, blocks: Tensor | None, block: int
) -> tuple[Tensor, Tensor | None]:
    """Scores FP32 [G, n, S] of all keys, or of the candidates [G, n, C] with their positions; -inf where not allowed.

    Few candidates are gathered; where a group's rows together have more than there are keys, all keys are scored.
    """
    places = None if blocks is None else block_positions(blocks, block)
    if places is not None and places.shape[1] * places.shape[2] < keys.shape[1]:
        allowed = (places >= 0) & (places < visible[..., None])
        places = places.masked_fill(~allowed, 0)
        group = torch.arange(len(keys), device=keys.device)[:, None, None]
        scores = row_scores(query.q, keys[group, places], query.weights)
        return scores.masked_fill(~allowed, -torch.inf), places
    scores = index_scores(query.q, keys, query.weights)
    allowed = torch.arange(keys.shape[1], device=keys.device) < visible[..., None]
    if places is not None:
        allowed = allowed & _marked(places, keys.shape[1])
    return scores.masked_fill(~allowed, -torch.inf), None


def _marked(places: Tensor, count: int) -> Tensor:
    """bool [G, n, count], true at the places int64 [G, n, C] that are at least 0 and below count."""
    inside = torch.where((places >= 0) & (places < count), places, count)
    marks = torch.zeros(*places.shape[:2], count + 1, dtype=torch.bool, device=places.device)
    return marks.scatter_(-1, inside, True)[..., :count]


def _padded(places: Tensor, count: int, front: bool = False) -> Tensor:
    """Places int64 [..., n] with -1 for those up to `count`, behind or before them."""
    short = count - places.shape[-1]
    return torch.nn.functional.pad(places, (short, 0) if front else (0, short), value=-1)


def _latents(chosen: Tensor, group: Group, entries: LiveEntries) -> tuple[Tensor, Tensor]:
    """(far, places in it): all live latents where the rows together choose as many, else the chosen ones."""
    rows, count = chosen.shape[1:]
    if rows * count >= entries.count(group):
        return entries.latents(group), chosen
    far = entries.chosen_latents(group, chosen.flatten(1))
    places = torch.arange(rows * count, device=chosen.device).view(rows, count)
    return far, torch.where(chosen >= 0, places, -1)
