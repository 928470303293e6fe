"""Decode and verification steps of fixed shapes, to be recorded as CUDA graphs.

A shape is a number of rows and a bound on the requests' lengths. Every row counts by itself: it reads what the rows
before it, of the same step too, have written to the rings, so that how the rows are shared out among requests is no
part of a shape. A step with fewer rows repeats its first one, which writes the same bytes to the same places; shorter
requests cost no more, since kernels know the rows' own lengths.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from deepinfer.cache.storage import Caches
from deepinfer.core.batch import Batch, Group, Half, Pairs
from deepinfer.core.plan import Span
from deepinfer.model.drafter import Drafter
from deepinfer.model.model import InferenceModel
from deepinfer.model.recorder import SIZES, Recorder, size_for
from deepinfer.speculative.layout import owners_and_places
from deepinfer.speculative.speculator import Chosen

UNPACKED_KEYS = 1 << 22
"""`most_keys` of operators that unpack the index keys that each row scores."""
_SHORTEST = 1024


@dataclass(frozen=True)
class Drafted:
    """What a step needs where there are drafts. tokens: int64 [slots, G], the newest block of every slot."""

    drafter: Drafter
    tokens: Tensor


@dataclass(frozen=True)
class _Recorded:
    """inputs: int64 [9, B], as `_columns` makes them.

    run: carries the step out; its logits FP32 [B, vocab] stay valid until the next one.
    """

    inputs: Tensor
    batch: Batch
    run: Callable[[], Tensor]


@dataclass(frozen=True)
class Recording:
    """How steps are recorded.

    model: that of the engine, attending row by row. most: rows of the largest step. most_keys: rows times bound on
    lengths of the largest step.
    """

    model: InferenceModel
    recorder: Recorder
    most: int = SIZES[-1]
    most_keys: int = 1 << 62

    def steps(self, caches: Caches, drafted: Drafted | None = None) -> "RecordedSteps":
        """The steps over some caches."""
        return RecordedSteps(self, caches, drafted)


class RecordedSteps:
    """The decode steps of one model over one set of caches, and the verification steps if there is a drafter."""

    def __init__(self, recording: Recording, caches: Caches, drafted: Drafted | None = None) -> None:
        """With `drafted` a step also keeps what later blocks need of its rows."""
        self._how, self._model = recording, recording.model
        self._caches, self._drafted = caches, drafted
        self._recorded: dict[tuple[int, int], _Recorded] = {}
        self._logits: Tensor | None = None  # of all recordings, which else would hold their own for good

    def holds(self, rows: int) -> bool:
        """Whether steps of so many rows are recorded, for short requests at least."""
        return rows <= self._how.most and size_for(rows) * _SHORTEST <= self._how.most_keys

    def takes(self, spans: Sequence[Span], rows: int | None = None) -> bool:
        """Whether a step is of this kind: rows that go on from the newest token, each to give a next one.

        rows: of the step, if drafts of its spans will be left out.
        """
        count = sum(span.count for span in spans) if rows is None else rows
        if count > self._how.most or size_for(count) * _bound(spans) > self._how.most_keys:
            return False
        return all(
            span.token_ids is None
            and span.sample
            and span.first > span.floor
            and span.first >= max(span.write_from, span.decoder_from)
            for span in spans
        )

    def run(self, spans: Sequence[Span], chosen: Chosen | None = None) -> tuple[Batch, Tensor]:
        """The rows in the order of the spans, and their logits FP32 [N, vocab], valid until the next step.

        chosen: which of the spans' drafts are run; None: all.
        """
        fields = [(s.slot, s.first, s.floor, max(s.floor, s.decoder_from), s.cut) for s in spans]
        columns = torch.from_numpy(np.array(fields, dtype=np.int64).T.copy())
        counts = torch.tensor([span.count for span in spans])
        count = int(counts.sum())
        if chosen is not None:
            columns = columns.to(self._model.device, non_blocking=True)
            counts, count = chosen.layout.counts + 1, chosen.rows
        key = size_for(count), _bound(spans)
        values = _columns(columns, counts, count, key[0])
        if key not in self._recorded:
            self._recorded[key] = self._new(values, key[1])
        recorded = self._recorded[key]
        recorded.inputs.copy_(values, non_blocking=True)
        return _first(recorded.batch, count), recorded.run()[:count]

    def _new(self, values: Tensor, bound: int) -> _Recorded:
        inputs = values.to(self._model.device)
        batch = _batch(inputs, bound)
        step = partial(self._step, batch, inputs)
        # The rings of these kinds are so short that a step writes over what it has read.
        return _Recorded(inputs, batch, self._how.recorder.record(step, (self._caches.history, self._caches.pairs)))

    def _step(self, batch: Batch, inputs: Tensor) -> Tensor:
        caches, slots, drafted = self._caches, inputs[0], self._drafted
        if drafted is None:
            torch.index_select(caches.newest, 0, slots, out=batch.ids)
        else:
            known = torch.cat((caches.newest[:, None], drafted.tokens), dim=1)
            torch.index_select(known.flatten(), 0, slots * known.shape[1] + inputs[4], out=batch.ids)
            if caches.layout.lookback:  # rows look back at drafts before them, which are in the ring in no other way
                caches.history[slots, inputs[1].remainder(caches.history.shape[1])] = batch.ids
        output = self._model.step(batch, caches, features=drafted is not None)
        if drafted is not None and output.features is not None:
            drafted.drafter.remember(output.features, batch.decoder, caches)
        return self._room(output.logits).copy_(output.logits)

    def _room(self, logits: Tensor) -> Tensor:
        """Where the logits of a step go."""
        rows = len(logits)
        if self._logits is None or len(self._logits) < rows:
            most = self._caches.slots * (self._caches.ring - self._model.config.sliding_window)
            self._logits = logits.new_empty(max(rows, size_for(min(most, SIZES[-1]))), logits.shape[1])
        return self._logits[:rows]


def _bound(spans: Sequence[Span]) -> int:
    """On the lengths of the requests: a power of two."""
    return max(_SHORTEST, 1 << (max(span.end for span in spans) - 1).bit_length())


def _columns(fields: Tensor, counts: Tensor, count: int, size: int) -> Tensor:
    """int64 [9, size], of the rows: slots, positions, lowest positions in windows of the two halves, places (0: newest
    token, k: k-th draft behind it), what `Pairs` has: rows, partners, kept ones, and the positions of pending tokens.
    The first row fills it up.

    fields: int64 [5, R], of the spans: slots, first positions, floors of both halves, cuts. counts: int64 [R], rows of
    each, `count` in all.
    """
    owners, places = owners_and_places(counts, count)
    slots, firsts, floors, decoded, cuts = fields[:, owners]
    rows, positions = torch.arange(count, device=fields.device), firsts + places
    decoder_lowest = torch.maximum(decoded, torch.where(positions >= cuts, cuts, 0))
    odd, behind = positions % 2 == 1, places > 0
    # Of a pair in the step both rows write the same: the entry, and the even token as the one that is pending. An even
    # row without its partner writes what that will write over, and an odd one keeps what nobody will read.
    completing = torch.where(odd | (places == counts[owners] - 1), rows, rows + 1)
    partners = torch.where(odd, torch.where(behind, rows - 1, size + rows), rows)
    kept = torch.where(odd & behind, rows - 1, rows)
    made = torch.stack((slots, positions, floors, decoder_lowest, places, completing, partners, kept, positions - 1))
    return torch.cat((made, made[:, :1].expand(-1, size - count)), 1)


def _batch(inputs: Tensor, bound: int) -> Batch:
    """Rows that read everything about themselves from `inputs` [9, B]."""
    slots, positions, lowest, decoder_lowest, _, completing, partners, kept, before = inputs
    rows = torch.arange(len(slots), device=inputs.device)
    group = Group(0, 1, slots, positions, lowest, (bound,) * len(slots))
    encoder = Half((group,), positions, slots, lowest)
    decoder = Half((replace(group, floors=decoder_lowest),), positions, slots, decoder_lowest)
    pairs = Pairs(completing, partners, slots, before, kept)
    return Batch(torch.zeros_like(slots), encoder, decoder, rows, rows, rows, pairs)


def _first(batch: Batch, count: int) -> Batch:
    """The same of the first rows, as far as samplers look."""
    encoder = batch.encoder
    narrowed = Half(encoder.groups, encoder.positions[:count], encoder.slots[:count], encoder.lowest[:count])
    return replace(batch, ids=batch.ids[:count], encoder=narrowed)
