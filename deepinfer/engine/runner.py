"""Runs a batch through the reference model."""

import torch
from torch import Tensor

from deepinfer.engine.batch import Batch
from deepinfer.reference.model import ReferenceModel


class ReferenceRunner:
    """Maps a batch to next-token logits without caches: every step reads the whole sequences."""

    def __init__(self, model: ReferenceModel, replay_mode: str, vocabulary: int) -> None:
        """Run `model`; only ids below `vocabulary` (the tokenizer's size) and not the image marker may be generated."""
        self._model = model
        self._replay_mode = replay_mode
        config = model.config
        self._forbidden = torch.arange(config.vocab_size, device=model.embed.weight.device) >= vocabulary
        if config.image_token_id is not None:
            self._forbidden[config.image_token_id] = True

    @torch.inference_mode()
    def __call__(self, batch: Batch) -> Tensor:
        """Return FP32 logits [rows, vocab] after each row's newest token, -inf for what may not be generated."""
        start = None if self._replay_mode == "off" else batch.replay_start
        output = self._model(batch.ids, batch.types, batch.images, start, compact=self._replay_mode == "compact")
        rows = torch.arange(len(batch.last), device=batch.last.device)
        logits: Tensor = output.logits[rows, batch.last - output.first]
        return logits.masked_fill(self._forbidden, -torch.inf)
