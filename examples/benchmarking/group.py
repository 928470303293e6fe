"""One rank of a group that shares prompts, measured alone: its part of each step, with the exchanges left out."""

from collections.abc import Sequence

import torch
from torch import Tensor

from deepinfer.cache.storage import Caches
from deepinfer.core.batch import Batch
from deepinfer.core.plan import Plan, Span
from deepinfer.engine.recorded import RecordedSteps
from deepinfer.model.model import InferenceModel, StepOutput
from deepinfer.parallel.context import RowWork, is_shared, share_rows


class Turns:
    """A rank's end of its group: its own rows stand for those of the others, which take as much memory and no link."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def gather(self, rows: Tensor, most: int) -> Tensor:
        """The rank's rows, padded to `most`, as often as there are ranks."""
        return padded(rows, most).repeat(self.size, *[1] * (rows.dim() - 1))


class OneOfGroup:
    """In place of `deepinfer.engine.context.Context`: the leader's part."""

    def __init__(self, model: InferenceModel, caches: Caches, ranks: int) -> None:
        self._model, self._caches, self._group = model, caches, Turns(0, ranks)
        self._work, self._rings = RowWork(model.config), (caches.ring, caches.pairs.shape[2])
        self._recorded: RecordedSteps | None = None

    def attach(self, recorded: RecordedSteps | None, drafts: Tensor | None) -> None:
        """Replay these steps, which every rank runs whole."""
        self._recorded = recorded

    def prepare(self, plan: Plan) -> None:
        """Nobody has to be told."""

    def step(self, spans: Sequence[Span], batch: Batch, features: bool) -> StepOutput:
        """The rank's part of a step, if it is worth sharing."""
        if is_shared(spans, self._group.size):
            batch = share_rows(batch, spans, self._work, self._rings, self._group)  # type: ignore[arg-type]
        return self._model.step(batch, self._caches, features)

    def replay(self, spans: Sequence[Span]) -> tuple[Batch, Tensor]:
        """A recorded step."""
        assert self._recorded is not None
        return self._recorded.run(spans)


def padded(rows: Tensor, most: int) -> Tensor:
    """Rows [n, ...] and zeros behind them: [most, ...]."""
    return torch.cat((rows, rows.new_zeros(most - len(rows), *rows.shape[1:])))
