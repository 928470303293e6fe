"""The model on ranks that share its routed experts: all ranks run a step together, some of them without rows."""

from collections.abc import Sequence

import torch

from deepinfer.cache.storage import Caches
from deepinfer.config.model import ModelConfig
from deepinfer.core.batch import Batch
from deepinfer.model.experts import RoutedExperts
from deepinfer.model.memory import ReadTables
from deepinfer.model.model import InferenceModel, StepOutput
from deepinfer.model.row_operators import RowOperators
from deepinfer.model.weights import ModelWeights
from deepinfer.parallel.balancer import Balancer
from deepinfer.parallel.collectives import Collectives
from deepinfer.parallel.ranks import Ranks
from deepinfer.parallel.tables import SharedTables


class SharingModel(InferenceModel):
    """One rank's model. Every step begins with an agreement on what all ranks are about to run.

    A step that fails ends all ranks: the others wait for its experts. It cannot be recorded, since the host has to know
    how many rows go where.
    """

    recordable = False

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        classes: Sequence[int],
        operators: RowOperators | None,
        experts: Sequence[RoutedExperts],
        tables: ReadTables | None,
        ranks: Ranks,
        collectives: Collectives,
        balancer: Balancer,
    ) -> None:
        super().__init__(config, weights, classes, operators, experts, tables)
        self._ranks, self._collectives, self._balancer = ranks, collectives, balancer
        self._decoders = False

    def step(self, batch: Batch, caches: Caches, features: bool = False) -> StepOutput:
        """As for one process, with the experts of all ranks."""
        with self._ranks.together():
            self._agree(len(batch.ids), len(batch.decoder_rows))
            return super().step(batch, caches, features)

    @torch.inference_mode()
    def stand_by(self) -> bool:
        """Help the others with one step, without own rows; False if no rank has any."""
        with self._ranks.together():
            if not self._agree(0, 0):
                return False
            if isinstance(self._tables, SharedTables):
                self._tables.stand_by()
            last = self.config.num_hidden_layers if self._decoders else self.config.decoder_start
            self._take_part(0, last)
            return True

    def stand_by_from(self, layer: int) -> None:
        """Own rows end here; others may have some that go on."""
        if self._decoders:
            self._take_part(layer, self.config.num_hidden_layers)

    def _agree(self, rows: int, decoder_rows: int) -> bool:
        """Whether any rank has rows; settles whether any has decoder rows, and lets experts that have moved be used."""
        most = self._collectives.most([rows, decoder_rows, -self._balancer.ready])
        self._decoders = most[1] > 0
        self._balancer.between_steps(-most[2], most[0] > 0)
        return most[0] > 0

    def _take_part(self, first: int, end: int) -> None:
        """Run the experts of some layers for the others' rows."""
        nothing = torch.empty(0, self.config.hidden_size, dtype=self.dtype, device=self.device)
        chosen = torch.empty(0, self.config.num_experts_per_tok, dtype=torch.int64, device=self.device)
        for layer in range(first, end):
            weights = self.weights.layers[layer].experts
            self.experts[layer](nothing, chosen, chosen.float(), weights, self.config.swiglu_limit)(lambda: nothing)
