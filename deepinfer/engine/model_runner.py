"""Carries plans out: pages, rows, the model, sampling. Sampled tokens stay on the device for the next plan."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch
from torch import Tensor

from deepinfer.cache.storage import Caches
from deepinfer.core.arriving import Arriving
from deepinfer.core.batch import Batch, Pictures, Recalled
from deepinfer.core.errors import ConfigError, EngineError
from deepinfer.core.plan import Plan, Span
from deepinfer.core.request import Request
from deepinfer.core.sampled import PromptLogprobs, Sampled, SampledRow, TokenMasks
from deepinfer.engine.context import Context
from deepinfer.engine.placing import Places, among
from deepinfer.engine.profiling import LaunchedRounds, RecordedRounds, Rounds, measure, platform_name
from deepinfer.engine.prompt_scores import prompt_logprobs, scored_rows, scored_spans
from deepinfer.engine.recorded import Drafted, Recording
from deepinfer.engine.vision_stage import VisionStage
from deepinfer.model.batching import Arrangement, arrange
from deepinfer.model.drafter import Drafter
from deepinfer.model.model import InferenceModel, StepOutput
from deepinfer.model.pictures import PromptImages, combine
from deepinfer.ops.choice import batch_invariant
from deepinfer.sampling.grammar.grammars import Grammars
from deepinfer.sampling.sampler import Sampler
from deepinfer.sampling.transfer import integers, to_device
from deepinfer.speculative.calibration import Calibration
from deepinfer.speculative.recording import Outcome, RoundLog
from deepinfer.speculative.rounds import Round
from deepinfer.speculative.speculator import Chosen, Speculator
from deepinfer.speculative.times import Measured

NO_DRAFTS = "nothing is drafted here: nextn is 0, or this checkpoint has no draft stages"


class ModelRunner:
    """Runs a model over its caches; knows of a request only what its rows need.

    Plans are run in their order. A step that raises leaves the caches of its own spans undefined, and no others'.
    """

    def __init__(
        self, model: InferenceModel, caches: Caches, vocabulary: int, invariant: bool = False, *,
        drafter: Drafter | None = None, calibration: Calibration | None = None, rejection: bool = False,
        recording: Recording | None = None, context: Context | None = None,
    ) -> None:  # fmt: skip
        """Only ids below `vocabulary` (the tokenizer's size) and not the image marker are ever sampled.

        invariant: a row gets the same bits whatever else is in its step. With a `drafter` plans may verify drafts;
        `calibration` mends its confidence; `rejection`: whether those of random requests are judged by that rule.
        recording: how decode and verification steps, and drafting, are recorded; None: they are not. context: runs all
        steps, with other ranks.
        """
        self._model, self._caches, self._invariant = model, caches, invariant
        self._context = context
        config = model.config
        forbidden = torch.arange(config.vocab_size, device=model.device) >= vocabulary
        if config.image_token_id is not None:
            forbidden[config.image_token_id] = True
        self.sampler = Sampler(forbidden, caches.slots, config.eos_token_id)
        self.grammars = Grammars(-(-config.vocab_size // 32), model.device)
        self._speculator, drafted = None, None
        if drafter is not None:
            fitted = calibration or Calibration.identity(drafter.block_size)
            recorder = None if recording is None else recording.recorder
            self._speculator = Speculator(drafter, self.sampler, caches, fitted, rejection, recorder)
            drafted = Drafted(drafter, self._speculator.blocks.tokens)
        self._recorded = None if recording is None else recording.steps(caches, drafted)
        if context is not None:
            context.attach(self._recorded, None if drafted is None else drafted.tokens)
        self._recorder = None if recording is None else recording.recorder
        self._delayed: set[int] = set()
        self.rounds = RoundLog(config.eos_token_id)
        self._places = Places()
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
        if self._speculator is not None:
            self._speculator.admit(request_id, request)
        if request.images:
            self._images[request_id] = PromptImages(request.token_types, request.images)

    def forget(self, request_id: int) -> None:
        """Drop a request that no later plan runs."""
        del self._requests[request_id]
        self.sampler.forget(request_id)
        self.grammars.forget(request_id)
        if self._speculator is not None:
            self._speculator.forget(request_id)
        self._images.pop(request_id, None)
        self._places.forget(request_id)

    @torch.inference_mode()
    def run(self, plan: Plan) -> Sampled:
        """Carry out `plan`: the next tokens of every span to be sampled, in their order."""
        begin, before = time.perf_counter(), self._recordings
        failures = self._encode(plan)
        sampled = self._step(plan)
        self.rounds.statistics.running += time.perf_counter() - begin
        if self._recordings > before:
            self._delayed.add(plan.number)
        return replace(sampled, failures={**sampled.failures, **failures}).sent()

    @property
    def _recordings(self) -> int:
        return 0 if self._recorder is None else self._recorder.recordings

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
        self._caches.map_pages(plan.pages)
        if self._context is not None:
            self._context.prepare(plan)
        spans, chosen = self._spans(plan)
        if not spans:
            wanted = sum(span.sample for span in plan.spans)
            nothing = torch.zeros(wanted, dtype=torch.int64, device=self._model.device)
            return Sampled(nothing, counts=nothing)
        spans, filling = self.grammars.start(spans, self._drafts_of)
        batch, output = self._run_model(spans, chosen)
        with batch_invariant(self._invariant):  # what is drafted decides no token
            scored = () if output.scored is None else self._prompt_logprobs(spans, output.scored)
        if self._speculator is not None and output.features is not None:
            self._speculator.remember(output.features, batch.decoder)
        self.sampler.read(spans, batch)
        masks = None if filling is None else self.grammars.on_device(filling.result())
        sampled = self._sample(output.logits, [span for span in spans if span.sample], masks, plan, chosen)
        sampled = replace(sampled, prompts=scored, failures=self.grammars.failures(spans))
        return among(plan, spans, sampled) if len(spans) < len(plan.spans) else sampled

    def was_delayed(self, number: int) -> bool:
        """Whether a plan's step had to be recorded first, so that its time says nothing; to be asked once."""
        delayed = number in self._delayed
        self._delayed.discard(number)
        return delayed

    def record(self) -> list[Round]:
        """The list that gets the rounds of speculation from now on, for calibration. ConfigError without drafts."""
        if self._speculator is None:
            raise ConfigError(NO_DRAFTS)
        self.rounds.kept = []
        return self.rounds.kept

    def profile(self, ids: Sequence[int]) -> tuple[str, Measured]:
        """Time rounds of all sizes with text `ids`; the platform's name, and times. No request may use the caches."""
        if self._speculator is None:
            raise ConfigError(NO_DRAFTS)
        if self._requests:
            raise ValueError("requests use the caches")
        measured = measure(self._rounds(self._speculator, ids), self._caches, self._model.config.sliding_window)
        return platform_name(self._model.device, self._model.dtype), measured

    def _rounds(self, speculator: Speculator, ids: Sequence[int]) -> Rounds:
        """As the engine will run them, with the text `ids`; the largest may be too large to be recorded."""
        text, caches = torch.tensor(ids, device=self._model.device), self._caches
        launched = LaunchedRounds(self._model, speculator.drafter, caches, text)
        most, drafts = caches.slots * (1 + speculator.block_size), speculator.recorded
        if self._recorded is None or drafts is None or not self._recorded.holds(most):
            return launched
        tokens = speculator.blocks.tokens
        tokens.copy_(text[torch.arange(tokens.numel(), device=text.device) % len(text)].view_as(tokens))
        caches.newest.copy_(tokens[:, 0])
        return RecordedRounds(self._recorded, drafts)

    def stand_by(self) -> bool:
        """Help other ranks with one step of theirs; False if they have none."""
        with batch_invariant(self._invariant):
            return self._model.stand_by() if self._context is None else self._context.stand_by()

    def _run_model(self, spans: Sequence[Span], chosen: Chosen | None) -> tuple[Batch, StepOutput]:
        if self._recorded is not None and (chosen is not None or self._recorded.takes(spans)):
            if self._context is None:
                batch, logits = self._recorded.run(spans, chosen)
            else:
                batch, logits = self._context.replay(spans)
            return batch, StepOutput(logits, None)
        batch = self.batch(spans)
        features = self._speculator is not None
        with batch_invariant(self._invariant):
            if self._context is not None:
                return batch, self._context.step(spans, batch, features)
            return batch, self._model.step(batch, self._caches, features)

    def _prompt_logprobs(self, spans: Sequence[Span], hidden: Tensor) -> tuple[PromptLogprobs, ...]:
        return prompt_logprobs(scored_spans(spans, self._requests), hidden, self._model.head, self.sampler)

    def _spans(self, plan: Plan) -> tuple[Sequence[Span], Chosen | None]:
        """The plan's spans as they are to run; where the device alone knows which of their drafts, those."""
        if self._speculator is None:
            return self._places.spans(plan, ()), None
        spans, total = self._places.spans(plan, self._speculator.blocks.fresh), plan.verified
        if total is None or not spans:
            return spans, None
        recorded = self._recorded if self._context is None else None  # other ranks are told by the host
        if recorded is not None and recorded.takes(spans, len(spans) + total):
            chosen = self._speculator.choose(spans, total)
            if chosen is not None:
                return spans, chosen
        return self._speculator.trim(spans, total), None

    def _drafts_of(self, span: Span) -> list[int]:
        """The drafts that the span verifies; waits for the device."""
        if self._speculator is None:
            return []
        drafts: list[int] = self._speculator.blocks.tokens[span.slot, : span.drafts].tolist()
        return drafts

    def _sample(
        self, logits: Tensor, spans: Sequence[Span], masks: TokenMasks | None, plan: Plan, chosen: Chosen | None
    ) -> Sampled:
        """The next tokens of `spans`, and blocks drafted behind them if the plan wants that."""
        stated = verified = None
        if any(span.drafts for span in spans) and self._speculator is not None:
            stated = [Arriving(part) for part in self._speculator.stated(spans)]
            if chosen is None:
                sampled = self._speculator.sample(logits, spans, masks).sent()
            else:
                verified = Arriving(chosen.layout.counts)
                sampled = self._speculator.sample_chosen(logits, spans, chosen).sent()
        else:
            sampled = self.sampler.sample(logits, [SampledRow(s.request_id, s.slot, s.end) for s in spans], masks)
        newest = sampled.tokens
        if sampled.counts is not None:
            newest = newest.gather(1, sampled.counts[:, None] - 1)[:, 0]
        newest = newest.clamp(min=0)  # what follows a failed draw is dropped
        self._caches.newest[integers([span.slot for span in spans], self._model.device)] = newest
        if self._speculator is not None:
            return self._draft(self._speculator, spans, sampled.sent(), newest, _Waiting(stated, verified), plan)
        self._settle(spans, sampled)
        return sampled

    def _settle(self, spans: Sequence[Span], sampled: Sampled) -> list[int]:
        """Find out how many tokens the spans gave, which waits for the device if there were drafts; positions of the
        newest ones.
        """
        counts = sampled.host_counts()
        self.grammars.sampled(spans, sampled.tokens, counts)
        return self._places.advance(spans, counts)

    def _draft(
        self, speculator: Speculator, spans: Sequence[Span], sampled: Sampled, newest: Tensor,
        waiting: "_Waiting", plan: Plan,
    ) -> Sampled:  # fmt: skip
        begin = time.perf_counter()
        survival = speculator.draft_ahead(spans, sampled.counts) if plan.drafting else None
        ahead = time.perf_counter() - begin
        spans = waiting.settled(spans)
        positions = self._settle(spans, sampled)
        self.rounds.ran(plan.number, spans, lambda: Outcome(sampled.lists(), *waiting.said_of(spans)))
        begin = time.perf_counter()
        if survival is None:
            survival = speculator.draft(spans, newest, positions, plan.drafting)
        else:
            speculator.drafted(spans, positions)
        self.rounds.statistics.drafting += ahead + time.perf_counter() - begin
        return replace(sampled, survival=survival)

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
        """int64 [N], where the plan has none the newest tokens and the drafts behind them."""
        ids = np.zeros(sum(span.count for span in spans), dtype=np.int64)
        newest, drafts = [], []
        for span, start in zip(spans, rows.starts.tolist(), strict=True):
            if span.token_ids is None:
                newest.append((start, span.slot))
                drafts += [(start + 1 + place, span.slot, place) for place in range(span.drafts)]
            else:
                ids[start : start + span.count] = span.token_ids
        found = self._tensor(ids)
        if newest:
            rows_of, slots = self._tensor(np.array(newest, dtype=np.int64).T)
            found[rows_of] = self._caches.newest[slots]
        if drafts and self._speculator is not None:
            rows_of, slots, places = self._tensor(np.array(drafts, dtype=np.int64).T)
            found[rows_of] = self._speculator.blocks.tokens[slots, places]
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
        return to_device(values, self._model.device)


@dataclass(frozen=True)
class _Waiting:
    """What is on its way to the host of a step with drafts.

    stated: confidence logits and survival of the spans' blocks. verified: how many drafts the device has chosen of
    each. None: there are no drafts, or all were chosen.
    """

    stated: Sequence[Arriving] | None
    verified: Arriving | None

    def settled(self, spans: Sequence[Span]) -> Sequence[Span]:
        """The spans with the drafts that were run; waits for the device if it has chosen."""
        if self.verified is None:
            return spans
        counts = self.verified.get().tolist()
        return [replace(span, count=1 + count) for span, count in zip(spans, counts, strict=True)]

    def said_of(self, spans: Sequence[Span]) -> tuple[list[list[float]], list[list[float]]]:
        """Confidence logits, and survival; waits for the device."""
        if self.stated is None:
            return [[] for _ in spans], [[] for _ in spans]
        confidence, survival = (part.get().tolist() for part in self.stated)
        return confidence, survival
