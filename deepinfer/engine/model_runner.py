"""Carries plans out: pages, rows, the model, sampling. Sampled tokens stay on the device for the next plan."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import torch
from torch import Tensor

from deepinfer.cache.storage import Caches
from deepinfer.core.batch import Batch, Pictures, Recalled
from deepinfer.core.errors import EngineError
from deepinfer.core.plan import Plan, Span
from deepinfer.core.request import Request
from deepinfer.core.sampled import PromptLogprobs, Sampled, SampledRow
from deepinfer.engine.prompt_scores import prompt_logprobs, scored_rows, scored_spans
from deepinfer.engine.vision_stage import VisionStage
from deepinfer.model.batching import Arrangement, arrange
from deepinfer.model.model import InferenceModel
from deepinfer.model.pictures import PromptImages, combine
from deepinfer.ops.choice import batch_invariant
from deepinfer.sampling.grammar.grammars import Grammars
from deepinfer.sampling.sampler import Sampler


class ModelRunner:
    """Runs a model over its caches; knows of a request only what its rows need.

    Plans are run in their order. A step that raises leaves the caches of its own spans undefined, and no others'.
    """

    def __init__(self, model: InferenceModel, caches: Caches, vocabulary: int, invariant: bool = False) -> None:
        """Only ids below `vocabulary` (the tokenizer's size) and not the image marker are ever sampled.

        invariant: a row gets the same bits whatever else is in its step.
        """
        self._model, self._caches, self._invariant = model, caches, invariant
        config = model.config
        forbidden = torch.arange(config.vocab_size, device=model.device) >= vocabulary
        if config.image_token_id is not None:
            forbidden[config.image_token_id] = True
        self.sampler = Sampler(forbidden, caches.slots, config.eos_token_id)
        self.grammars = Grammars(-(-config.vocab_size // 32), model.device)
        self._requests: dict[int, Request] = {}
        self._images: dict[int, PromptImages] = {}
        self.vision = None
        if config.vision is not None and model.weights.vision is not None:
            self.vision = VisionStage(config.vision, model.weights.vision, invariant)

    def admit(self, request_id: int, request: Request) -> None:
        """Take note of a request before the first plan that runs it."""
        self._requests[request_id] = request
        self.sampler.admit(request_id, request)
        self.grammars.admit(request_id, request)
        if request.images:
            self._images[request_id] = PromptImages(request.token_types, request.images)

    def forget(self, request_id: int) -> None:
        """Drop a request that no later plan runs."""
        del self._requests[request_id]
        self.sampler.forget(request_id)
        self.grammars.forget(request_id)
        self._images.pop(request_id, None)

    @torch.inference_mode()
    def run(self, plan: Plan) -> Sampled:
        """Carry out `plan`: the next token of every span to be sampled, in their order."""
        failures = self._encode(plan)
        sampled = self._step(plan)
        return replace(sampled, failures=failures) if failures else sampled

    def _encode(self, plan: Plan) -> dict[int, EngineError]:
        """Run the vision stage; returns the requests that miss an image, and why."""
        if self.vision is None:
            return {}
        self.vision.drop(plan.dropped)
        with batch_invariant(self._invariant):
            failed = self.vision.run(plan.encodes, lambda one: self._requests[one.request_id].images[one.place])
        for span in plan.spans if self._images else ():
            images = self._images.get(span.request_id)
            for place in [] if images is None else images.read(span.first, span.end):
                if self._requests[span.request_id].images[place].digest not in self.vision:
                    failed.setdefault(span.request_id, EngineError(f"image {place} was not encoded"))
        return failed

    def _step(self, plan: Plan) -> Sampled:
        self._caches.write_pages([load.page for load in plan.loads], [cast(bytes, load.data) for load in plan.loads])
        self._map_pages(plan.pages)
        if not plan.spans:
            return Sampled(torch.empty(0, dtype=torch.int64, device=self._model.device))
        filling = self.grammars.start(plan.spans)
        batch = self.batch(plan.spans)
        with batch_invariant(self._invariant):
            output = self._model.step(batch, self._caches)
            scored = None if output.scored is None else self._prompt_logprobs(plan.spans, output.scored)
        self.sampler.read(plan.spans, batch)
        rows = [SampledRow(span.request_id, span.slot, span.end) for span in plan.spans if span.sample]
        masks = None if filling is None else self.grammars.on_device(filling.result())
        sampled = self.sampler.sample(output.logits, rows, masks)
        self.grammars.sampled(rows, sampled.tokens)
        slots = np.array([row.slot for row in rows], dtype=np.int64)
        self._caches.newest[self._tensor(slots)] = sampled.tokens.clamp(min=0)  # what follows a failed draw is dropped
        return sampled if scored is None else replace(sampled, prompts=scored)

    def stand_by(self) -> bool:
        """Help other ranks with one step of theirs; False if they have none."""
        with batch_invariant(self._invariant):
            return self._model.stand_by()

    def _prompt_logprobs(self, spans: Sequence[Span], hidden: Tensor) -> tuple[PromptLogprobs, ...]:
        return prompt_logprobs(scored_spans(spans, self._requests), hidden, self._model.head, self.sampler)

    def _map_pages(self, pages: Mapping[int, Sequence[int]]) -> None:
        if not pages:
            return
        slots = np.repeat(np.fromiter(pages, dtype=np.int64), [len(row) for row in pages.values()])
        columns = np.concatenate([np.arange(len(row)) for row in pages.values()])
        values = np.concatenate([np.array(row, dtype=np.int64) for row in pages.values()])
        table = self._caches.page_table
        table[self._tensor(slots), self._tensor(columns)] = self._tensor(values)

    def batch(self, spans: Sequence[Span]) -> Batch:
        """The rows of `spans` (at least one) as the model takes them."""
        device = self._model.device
        rows = arrange(spans, self._caches.pairs.shape[2], device)
        scored = scored_spans(spans, self._requests)
        return Batch(
            ids=self._ids(spans, rows),
            encoder=rows.encoder,
            decoder=rows.decoder,
            decoder_rows=rows.decoder_rows,
            sample_rows=rows.sample_rows,
            singles=rows.singles,
            pairs=rows.pairs,
            pictures=self._pictures(spans, rows),
            recalled=self._recalled(spans),
            scored_rows=self._tensor(scored_rows(scored, rows.decoder_starts)) if scored else None,
        )

    def _ids(self, spans: Sequence[Span], rows: Arrangement) -> Tensor:
        """int64 [N], those of single rows without an id taken from the newest tokens."""
        ids = np.zeros(sum(span.count for span in spans), dtype=np.int64)
        unknown = []
        for span, start in zip(spans, rows.starts.tolist(), strict=True):
            if span.token_ids is None:
                unknown.append((start, span.slot))
            else:
                ids[start : start + span.count] = span.token_ids
        found = self._tensor(ids)
        if unknown:
            places, slots = self._tensor(np.array(unknown, dtype=np.int64).T)
            found[places] = self._caches.newest[slots]
        return found

    def _pictures(self, spans: Sequence[Span], rows: Arrangement) -> Pictures | None:
        if self.vision is None or not self._images:
            return None
        parts = []
        for span, start in zip(spans, rows.starts.tolist(), strict=True):
            images = self._images.get(span.request_id)
            part = None if images is None else images.part(span.first, span.end, self.vision.cells)
            if part is not None:
                parts.append((start, part))
        hidden = self._model.config.hidden_size
        return combine(parts, len(rows.encoder.positions), hidden, self._model.weights.embed) if parts else None

    def _recalled(self, spans: Sequence[Span]) -> Recalled | None:
        """Tokens before the rows of requests that begin in the middle, behind a cached prefix."""
        lookback = self._caches.layout.lookback
        found = [
            (span.slot, position, self._requests[span.request_id].token_ids[position])
            for span in spans
            if span.first == span.floor
            for position in range(max(0, span.first - lookback), span.first)
        ]
        return Recalled(*self._tensor(np.array(found, dtype=np.int64).T)) if found else None

    def _tensor(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._model.device)
