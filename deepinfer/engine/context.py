"""Context parallel in the engine: of the ranks of a group one leads, the others run their part of each of its steps.

The leader alone schedules, samples and drafts, so ranks cannot come to differ about a token. Before each step it tells
the others what is to run: where rows lie, their ids, pages, embeddings of images. They keep caches like its own.
"""

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepinfer.cache.storage import Caches
from deepinfer.core.batch import Batch, Pictures, Recalled
from deepinfer.core.plan import PageLoad, Plan, Span
from deepinfer.engine.recorded import RecordedSteps
from deepinfer.model.batching import Integers, arrange
from deepinfer.model.model import InferenceModel, StepOutput
from deepinfer.ops.choice import batch_invariant
from deepinfer.parallel.collectives import Collectives
from deepinfer.parallel.context import RowWork, is_shared, share_rows
from deepinfer.parallel.model import SharingModel
from deepinfer.parallel.ranks import Ranks
from deepinfer.sampling.transfer import integers


@dataclass(frozen=True)
class _Order:
    """What the leader says before a step; tensors follow.

    spans: as they run, packed; None: this rank has no step, so help others. pages, loads: as in a `Plan`, since
    the last order. replayed: whether it is a recorded step. features: whether the leader wants them. recalled, cells:
    how many; cells None: no images.
    """

    spans: Integers | None = None
    pages: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    loads: tuple[PageLoad, ...] = ()
    replayed: bool = False
    features: bool = False
    recalled: int = 0
    cells: int | None = None


class Context:
    """One rank's end of its group.

    The leader calls `prepare`, and then `step`, `replay` or `stand_by`; for each of those all others call `follow`.
    """

    def __init__(
        self, model: InferenceModel, caches: Caches, ranks: Ranks, group: Collectives, invariant: bool = False
    ) -> None:
        self._model, self._caches, self._ranks, self._group, self._invariant = model, caches, ranks, group, invariant
        self._work, self._rings = RowWork(model.config), (caches.ring, caches.pairs.shape[2])
        self._experts_shared = isinstance(model, SharingModel)
        self._pages: dict[int, tuple[int, ...]] = {}
        self._loads: list[PageLoad] = []
        self._recorded: RecordedSteps | None = None
        self._drafts: Tensor | None = None

    def attach(self, recorded: RecordedSteps | None, drafts: Tensor | None) -> None:
        """Use these steps for `replay`; `drafts` int64 [slots, G] are the blocks that they verify, if there are any."""
        self._recorded, self._drafts = recorded, drafts

    @property
    def leads(self) -> bool:
        """Whether this rank is the one that the others of its group follow."""
        return self._group.rank == 0

    def prepare(self, plan: Plan) -> None:
        """Take note of what a plan does to pages; its step is the next one, if it has one."""
        self._pages.update(plan.pages)
        self._loads += plan.loads

    def step(self, spans: Sequence[Span], batch: Batch, features: bool) -> StepOutput:
        """Run a step of all ranks; `batch` are its rows, which `spans` have. A failure ends all ranks."""
        with self._ranks.together():
            recalled = 0 if batch.recalled is None else len(batch.recalled.ids)
            cells = None if batch.pictures is None else len(batch.pictures.rows)
            self._tell(spans, features=features, recalled=recalled, cells=cells)
            for tensor in _tensors(batch):
                self._group.spread(tensor)
            return self._run(spans, batch, features)

    def replay(self, spans: Sequence[Span]) -> tuple[Batch, Tensor]:
        """As `RecordedSteps.run`, on all ranks, each of which runs the whole step."""
        assert self._recorded is not None
        with self._ranks.together():
            self._tell(spans, replayed=True)
            slots = integers([span.slot for span in spans], self._model.device)
            for tokens in self._newest():
                self._group.spread(tokens[slots])
            return self._recorded.run(spans)

    def _tell(self, spans: Sequence[Span], **fields: Any) -> None:
        self._group.tell(pickle.dumps(_Order(_pack(spans), self._pages, tuple(self._loads), **fields)))
        self._pages, self._loads = {}, []

    def _newest(self) -> list[Tensor]:
        """What recorded steps read: the newest token of every slot, and its block of drafts."""
        return [self._caches.newest] if self._drafts is None else [self._caches.newest, self._drafts]

    def stand_by(self) -> bool:
        """Help other groups with one step of theirs; False if they have none. The others of this group do so, too."""
        with self._ranks.together():
            self._group.tell(pickle.dumps(_Order()))
            return self._model.stand_by()

    @torch.inference_mode()
    def follow(self) -> bool:
        """Do what the leader says next; False if there is nothing to do for any rank."""
        with self._ranks.together(), batch_invariant(self._invariant):
            order: _Order = pickle.loads(self._group.tell())
            if order.spans is None:
                return self._model.stand_by()
            spans = _unpack(order.spans)
            self._caches.write_pages([load.page for load in order.loads], [_bytes(load) for load in order.loads])
            self._caches.map_pages(order.pages)
            if order.replayed:
                self._follow_replay(spans)
            else:
                self._run(spans, self._receive(order, spans), order.features)
            return True

    def _follow_replay(self, spans: Sequence[Span]) -> None:
        assert self._recorded is not None
        slots = integers([span.slot for span in spans], self._model.device)
        for tokens in self._newest():
            told = torch.empty_like(tokens[slots])
            self._group.spread(told)
            tokens[slots] = told
        self._recorded.run(spans)

    def _run(self, spans: Sequence[Span], batch: Batch, features: bool) -> StepOutput:
        if is_shared(spans, self._group.size, self._experts_shared):
            batch = share_rows(batch, spans, self._work, self._rings, self._group)
        return self._model.step(batch, self._caches, features)

    def _receive(self, order: _Order, spans: Sequence[Span]) -> Batch:
        """The leader's batch, but for sampled rows."""
        config, device = self._model.config, self._model.device
        rows = arrange(spans, self._caches.pairs.shape[2], device)
        count, recalled, pictures = sum(span.count for span in spans), None, None

        def room(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        if order.recalled:
            recalled = Recalled(room(order.recalled), room(order.recalled), room(order.recalled))
        if order.cells is not None:
            cells = room(order.cells, config.hidden_size, dtype=self._model.dtype)
            pictures = Pictures(room(count), cells, room(order.cells))
        batch = Batch(
            ids=room(count),
            encoder=rows.encoder,
            decoder=rows.decoder,
            decoder_rows=rows.decoder_rows,
            sample_rows=room(0),
            singles=rows.singles,
            pairs=rows.pairs,
            pictures=pictures,
            recalled=recalled,
        )
        for tensor in _tensors(batch):
            self._group.spread(tensor)
        return batch


def _pack(spans: Sequence[Span]) -> Integers:
    """int64 [spans, 11], for a message: all but token ids, which travel as a tensor."""
    rows = [
        (s.request_id, s.slot, s.first, s.count, s.write_from, s.floor, s.cut, s.decoder_from, s.limit, s.sample,
         s.token_ids is None)
        for s in spans
    ]  # fmt: skip
    return np.array(rows, dtype=np.int64)


def _unpack(rows: Integers) -> list[Span]:
    spans = []
    for request, slot, first, count, written, floor, cut, decoded, limit, sample, drawn in rows.tolist():
        ids = None if drawn else ()
        spans.append(Span(request, slot, first, count, ids, written, floor, cut, decoded, bool(sample), limit))
    return spans


def _tensors(batch: Batch) -> list[Tensor]:
    """What only the leader knows of a batch."""
    found, recalled, pictures = [batch.ids], batch.recalled, batch.pictures
    if recalled is not None:
        found += [recalled.slots, recalled.positions, recalled.ids]
    if pictures is not None:
        found += [pictures.types, pictures.cells, pictures.rows]
    return found


def _bytes(load: PageLoad) -> bytes:
    assert isinstance(load.data, bytes)
    return load.data
