"""Runs prompts through the engine's own scheduler, runner and caches, and keeps what every decoder row computed."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from deepinfer.cache.manager import KVManager
from deepinfer.cache.storage import Caches
from deepinfer.config.model import VisionConfig
from deepinfer.core.batch import Batch
from deepinfer.core.plan import Plan
from deepinfer.core.request import Request
from deepinfer.core.sampling_params import SamplingParams
from deepinfer.engine.content import image_spans
from deepinfer.engine.loop import run_plain
from deepinfer.engine.model_runner import ModelRunner
from deepinfer.engine.replay import ReplayPolicy
from deepinfer.engine.scheduler import EndRules, Job, Pictures, Scheduler, SchedulerLimits, VisionLimits
from deepinfer.model.model import InferenceModel, StepOutput
from deepinfer.text.images import ImageInput

PAGE_SIZE = 8  # small, so that prompts of golden data fill several
ROWS_A_STEP = 4096
PATCHES_A_STEP = 24
NEW_TOKENS = 8  # requests that are through with their prompt decode while others prefill


@dataclass(frozen=True)
class Prompt:
    """ids, types: int64 [N]. start: first position that the decoder half runs, with mode `off` 0."""

    ids: Tensor
    types: Tensor
    start: int = 0
    images: tuple[ImageInput, ...] = ()


@dataclass(frozen=True)
class Run:
    """Logits [R, vocab] and features [R, F] of a prompt's rows from its `start` on, as the engine computed them."""

    logits: Tensor
    features: Tensor


@dataclass(frozen=True)
class _Starts(ReplayPolicy):
    """Golden data cuts each prompt where it likes: the starts come in the order in which requests are added."""

    starts: Iterator[int]

    def start(self, prompt_length: int) -> int:
        return next(self.starts)


@dataclass
class _Recorder:
    """Stands between runner and model: has the model give every decoder row's logits, and hands on the sampled ones."""

    model: InferenceModel
    rows: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)  # by slot and position

    def __getattr__(self, name: str) -> object:
        return getattr(self.model, name)

    def step(self, batch: Batch, caches: Caches, features: bool = False) -> StepOutput:
        every = torch.arange(len(batch.decoder_rows), device=self.model.device)
        output = self.model.step(replace(batch, sample_rows=every), caches, features=True)
        assert output.features is not None
        places = zip(batch.decoder.slots.tolist(), batch.decoder.positions.tolist(), strict=True)
        self.rows |= zip(places, zip(output.logits.cpu(), output.features.cpu(), strict=True), strict=True)
        return replace(output, logits=output.logits[batch.sample_rows])


def run(model: InferenceModel, prompts: Sequence[Prompt], mode: str, chunk: int | None) -> list[Run]:
    """Run `prompts` as one batch in chunks of at most `chunk` rows (None: whole) over caches of the real formats.

    Every request gets a slot at once and keeps it, so that slots tell requests apart.
    """
    config = model.config
    room = [len(prompt.ids) + NEW_TOKENS for prompt in prompts]
    pages = sum(-(-tokens // PAGE_SIZE) + 1 for tokens in room)
    caches = Caches(config, pages, len(prompts), PAGE_SIZE, device=model.device)
    scheduler = Scheduler(
        SchedulerLimits(len(prompts), ROWS_A_STEP, chunk, prefix_hits=False),
        _Starts(mode, 0, iter([prompt.start for prompt in prompts])),
        config.sliding_window,
        KVManager(pages, PAGE_SIZE, "golden", caches),
        EndRules(config.eos_token_id, config.max_position_embeddings),
        pictures=None if config.vision is None else Pictures(_vision_limits(config.vision), image_spans),
    )
    recorder = _Recorder(model)
    runner = ModelRunner(recorder, caches, config.vocab_size)  # type: ignore[arg-type]
    jobs = [_admit(scheduler, runner, index, prompt) for index, prompt in enumerate(prompts)]
    slots: dict[int, int] = {}

    def landed(plan: Plan, _: Sequence[Job]) -> None:
        for span in plan.spans:
            assert slots.setdefault(span.slot, span.request_id) == span.request_id, "a slot was given to two requests"

    run_plain(scheduler, runner, landed)
    by_request = {request_id: slot for slot, request_id in slots.items()}
    return [_collect(job, prompt, by_request, recorder) for job, prompt in zip(jobs, prompts, strict=True)]


def _vision_limits(vision: VisionConfig) -> VisionLimits:
    """So little a step that larger images take several, and no memory for more than one image at a time."""
    return VisionLimits(vision.num_hidden_layers, PATCHES_A_STEP)


def _admit(scheduler: Scheduler, runner: ModelRunner, index: int, prompt: Prompt) -> Job:
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    ids, types = tuple(prompt.ids.tolist()), tuple(prompt.types.tolist())
    request = Request(index, None, ids, types, prompt.images, params, seed=0)
    job = scheduler.job(scheduler.add(request))
    runner.admit(job.request_id, request)
    return job


def _collect(job: Job, prompt: Prompt, slots: dict[int, int], recorder: _Recorder) -> Run:
    if job.error is not None:
        raise job.error
    slot = slots[job.request_id]
    rows = [recorder.rows[slot, position] for position in range(prompt.start, len(prompt.ids))]
    logits, features = (torch.stack(part) for part in zip(*rows, strict=True))
    return Run(logits, features)
