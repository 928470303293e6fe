"""Blocks drafted in fixed shapes, to be recorded as CUDA graphs: the parallel pass, the serial tail, confidence.

A shape is a number of anchors and the way in which drafts are chosen; a step with fewer anchors repeats its first one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from deepinfer.cache.storage import Caches
from deepinfer.core.request import Request
from deepinfer.model.drafter import Anchors, Drafter
from deepinfer.model.recorder import SIZES, Recorder, size_for
from deepinfer.sampling.weights import first_largest, pick
from deepinfer.speculative.blocks import Blocks
from deepinfer.speculative.calibration import survival
from deepinfer.speculative.drafting import Pick, draft


@dataclass(frozen=True)
class Drawing:
    """How drafts of A anchors are drawn. temperatures: FP32 [A], 0 for the likeliest token. numbers: FP64 [A, G]."""

    temperatures: Tensor
    numbers: Tensor


@dataclass(frozen=True)
class _Recording:
    """places: int64 [3, A]: slots, positions, floors. drawing: None where all drafts are the likeliest tokens."""

    places: Tensor
    drawing: Drawing | None
    run: Callable[[], None]


def is_plain(request: Request) -> bool:
    """Whether a request's tokens, but for a grammar, depend on nothing but logits, temperature and random numbers."""
    p = request.params
    cut = p.temperature > 0 and (p.top_k > 0 or p.top_p < 1 or p.min_p > 0)
    return not (cut or p.penalises or p.logit_bias or p.min_tokens)


class RecordedDrafts:
    """Drafts blocks of plain requests into `blocks`, as the sampler's rules would choose the tokens."""

    def __init__(
        self,
        drafter: Drafter,
        caches: Caches,
        blocks: Blocks,
        temperatures: Sequence[float],
        allowed: Tensor,
        recorder: Recorder,
    ) -> None:
        """temperatures: of the calibration. allowed: FP32 [vocab], what is added to all logits: 0 or -inf."""
        self._drafter, self._caches, self._blocks, self._recorder = drafter, caches, blocks, recorder
        self._calibration = torch.tensor(temperatures, dtype=torch.float64, device=drafter.device)
        self._allowed = allowed
        self._recordings: dict[tuple[int, bool], _Recording] = {}

    @property
    def device(self) -> torch.device:
        """Where blocks are drafted."""
        return self._drafter.device

    def takes(self, anchors: int) -> bool:
        """Whether so many blocks are drafted at a time."""
        return anchors <= SIZES[-1]

    def run(self, slots: Tensor, positions: Tensor, floors: Tensor, drawing: Drawing | None) -> None:
        """Draft a block behind each slot's newest token, of which the caches know the id; int64 [A] each."""
        key = size_for(len(slots)), drawing is not None
        places = torch.stack((slots, positions, floors))
        if key not in self._recordings:
            self._recordings[key] = self._new(places, key[0], drawing)
        recording = self._recordings[key]
        _fill(recording.places, places)
        if drawing is not None and recording.drawing is not None:
            _fill(recording.drawing.temperatures, drawing.temperatures)
            _fill(recording.drawing.numbers.t(), drawing.numbers.t())
        recording.run()

    def _new(self, places: Tensor, size: int, drawing: Drawing | None) -> _Recording:
        block = self._drafter.block_size
        held = _fill(places.new_empty(3, size), places)
        own = None
        if drawing is not None:
            own = Drawing(held.new_ones(size, dtype=torch.float32), held.new_zeros(size, block, dtype=torch.float64))
        return _Recording(held, own, self._recorder.record(partial(self._work, held, own)))

    def _work(self, places: Tensor, drawing: Drawing | None) -> None:
        slots, positions, floors = places
        anchors = Anchors(self._caches.newest[slots], positions, slots, floors)
        made = draft(self._drafter, anchors, self._caches, self._pick(drawing))
        self._blocks.put(slots, made, survival(made.confidence.double(), self._calibration))

    def _pick(self, drawing: Drawing | None) -> Pick:
        return lambda logits, place: plain_choice(logits.add_(self._allowed), drawing, place).clamp_(min=0)


def plain_choice(weights: Tensor, drawing: Drawing | None, place: int) -> Tensor:
    """int64 [A]: the token that a plain request draws by logits [A, vocab] of allowed tokens; -1 where there are none.

    drawing: None for the likeliest everywhere. place: which of its numbers to draw by.
    """
    most = weights.amax(-1, keepdim=True)
    chosen = first_largest(weights)
    if drawing is not None:
        random = drawing.temperatures > 0
        shifted = weights - most.clamp(min=torch.finfo().min)
        shifted /= torch.where(random, drawing.temperatures, 1)[:, None]
        chosen = torch.where(random, pick(shifted, drawing.numbers[:, place]), chosen)
    return torch.where(most[:, 0] > -torch.inf, chosen, -1)


def _fill(target: Tensor, values: Tensor) -> Tensor:
    """Put values [..., A] into target [..., B], the first of them into what is left; returns the target."""
    count = values.shape[-1]
    target[..., :count] = values
    target[..., count:] = values[..., :1]
    return target
