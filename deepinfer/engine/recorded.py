"""Decode steps of fixed shapes: recorded once as CUDA graphs and replayed, so that a step costs one launch.

A shape is a number of rows and a bound on the requests' lengths. A step with fewer rows repeats its first one, which
writes the same bytes to the same places; shorter requests cost no more, since kernels know the rows' own lengths.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepinfer.cache.storage import Caches
from deepinfer.core.batch import Batch, Group, Half, Pairs
from deepinfer.core.plan import Span
from deepinfer.model.model import InferenceModel

ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)
"""Numbers of rows that steps are recorded for; larger steps are run as they come."""
_SHORTEST = 1024


@dataclass(frozen=True)
class _Recording:
    """inputs: int64 [4, B], of the rows: slots, positions, lowest positions in windows of the two halves.

    run: carries the step out; its logits FP32 [B, vocab] stay valid until the next one.
    """

    inputs: Tensor
    batch: Batch
    run: Callable[[], Tensor]


class RecordedSteps:
    """The decode steps of one model over one set of caches."""

    def __init__(self, model: InferenceModel, caches: Caches, record: bool) -> None:
        """Without `record` every step is run anew in its fixed shape: to test without a GPU."""
        self._model, self._caches, self._record = model, caches, record
        self._recordings: dict[tuple[int, int], _Recording] = {}
        self._pool: Any = None  # of the recordings' memory: only one of them runs at a time

    def takes(self, spans: Sequence[Span]) -> bool:
        """Whether a step is of this kind: rows that go on from the newest token, each to give a next one."""
        return len(spans) <= ROWS[-1] and all(
            span.token_ids is None
            and span.sample
            and span.first > span.floor
            and span.first >= max(span.write_from, span.decoder_from)
            for span in spans
        )

    def run(self, spans: Sequence[Span]) -> tuple[Batch, Tensor]:
        """The rows in the order of the spans, and their logits FP32 [S, vocab], valid until the next step."""
        rows = ROWS[bisect_left(ROWS, len(spans))]
        longest = max(span.end for span in spans)
        bound = max(_SHORTEST, 1 << (longest - 1).bit_length())
        values = np.array(
            [
                (span.slot, span.first, span.floor, max(span.floor, span.decoder_from, _cut(span)))
                for span in [*spans, *[spans[0]] * (rows - len(spans))]
            ],
            dtype=np.int64,
        ).T
        key = rows, bound
        if key not in self._recordings:
            self._recordings[key] = self._new(np.ascontiguousarray(values), bound)
        recording = self._recordings[key]
        recording.inputs.copy_(torch.from_numpy(np.ascontiguousarray(values)))
        return _first(recording.batch, len(spans)), recording.run()[: len(spans)]

    def _new(self, values: np.ndarray, bound: int) -> _Recording:
        inputs = torch.from_numpy(values).to(self._model.device)
        batch = _batch(inputs, bound, torch.zeros_like(inputs[0]))

        def step() -> Tensor:
            torch.index_select(self._caches.newest, 0, inputs[0], out=batch.ids)
            return self._model.step(batch, self._caches).logits

        if not self._record:
            return _Recording(inputs, batch, step)
        self._warm_up(step)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits = step()
        self._pool = self._pool or graph.pool()

        def replay() -> Tensor:
            graph.replay()
            return logits

        return _Recording(inputs, batch, replay)

    def _warm_up(self, step: Callable[[], Tensor]) -> None:
        """Run a step that is then run again: kernels are compiled, libraries choose theirs.

        Two kinds of cache are put back: their rings are so short that a step writes over what it has read.
        """
        kept = [(cache, cache.clone()) for cache in (self._caches.history, self._caches.pairs)]
        step()
        for cache, before in kept:
            cache.copy_(before)
        torch.cuda.synchronize()


def _cut(span: Span) -> int:
    return span.cut if span.first >= span.cut else 0


def _batch(inputs: Tensor, bound: int, ids: Tensor) -> Batch:
    """Rows that read everything about themselves from `inputs` [4, B]."""
    slots, positions, lowest, decoder_lowest = inputs
    rows = torch.arange(len(slots), device=inputs.device)
    group = Group(0, 1, slots, positions, lowest, (bound,) * len(slots))
    encoder = Half((group,), positions, slots, lowest)
    decoder = Half((replace(group, floors=decoder_lowest),), positions, slots, decoder_lowest)
    # A row that completes no pair writes what the one that will complete it writes over, and keeps what nobody reads.
    pairs = Pairs(rows, len(rows) + rows, slots, positions - 1, rows)
    return Batch(ids, encoder, decoder, rows, rows, rows, pairs)


def _first(batch: Batch, count: int) -> Batch:
    """The same of the first rows, as far as samplers look."""
    encoder = batch.encoder
    narrowed = Half(encoder.groups, encoder.positions[:count], encoder.slots[:count], encoder.lowest[:count])
    return replace(batch, ids=batch.ids[:count], encoder=narrowed)
