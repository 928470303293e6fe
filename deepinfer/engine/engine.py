"""A loaded model and the way of its requests: admission, steps, replies."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Lock

from deepinfer.config.engine import EngineConfig
from deepinfer.config.envs import Environment
from deepinfer.core.outputs import RequestOutput
from deepinfer.core.plan import Plan
from deepinfer.core.request import Request
from deepinfer.engine.admission import Admission
from deepinfer.engine.assembly import assemble, sample_ids
from deepinfer.engine.interrupts import held_interrupts
from deepinfer.engine.loop import run_ahead, run_plain
from deepinfer.engine.replies import Answer, completion_output
from deepinfer.engine.scheduler import Job
from deepinfer.engine.sequence import Sequence as Running
from deepinfer.engine.statistics import EngineStatistics
from deepinfer.parallel.member import Member
from deepinfer.sampling.grammar.compiler import Compiler
from deepinfer.sampling.grammar.request import GrammarDesk
from deepinfer.sampling.grammar.vocabulary import Vocabulary
from deepinfer.sampling.random import derived_seed
from deepinfer.speculative.rounds import Round
from deepinfer.speculative.times import Measured
from deepinfer.text.chat import ChatFormat
from deepinfer.text.loading import ImageLoader
from deepinfer.text.sources import ImageLimits


class Engine:
    """Owns the weights and caches of one checkpoint; the only object that runs them. Callers take turns."""

    def __init__(
        self, directory: Path, environment: Environment, settings: EngineConfig, member: Member | None = None
    ) -> None:
        """Load the checkpoint in `directory`; CheckpointError or ConfigError if it or the settings will not do.

        `member`: this rank among others that serve the same model; None: it is alone.
        """
        self._parts = assemble(directory, environment, settings, member)
        self._loop = run_ahead if settings.asynchronous else run_plain
        self.config, self.tokenizer = self._parts.config, self._parts.tokenizer
        self._chat_format = ChatFormat(self.tokenizer)
        capacity = self._parts.kv.total_pages * self._parts.kv.page_size
        self._turn = Lock()
        vocabulary = Vocabulary(self.tokenizer, self.config.vocab_size, self.config.eos_token_id)
        self.grammars = grammars = GrammarDesk(Compiler(vocabulary))
        images = ImageLoader(self.config.vision, _image_limits(settings))
        self.admission = Admission(self.config, self.tokenizer, self._chat_format, grammars, images, capacity)
        parts = self._parts
        pictures = parts.pictures.statistics if parts.pictures is not None else None
        self.statistics = EngineStatistics(
            parts.scheduler.statistics,
            parts.kv.statistics,
            parts.expert_loads,
            pictures,
            parts.runner.rounds.statistics,
        )

    def run(
        self,
        requests: Sequence[Request],
        on_step: Callable[[list[Running]], None],
        on_output: Callable[[RequestOutput], None] | None = None,
    ) -> list[RequestOutput]:
        """Answer `requests`, in their order; `on_step` gets the sequences that a step extended or lost.

        `on_output` gets each request's output in the step that ends it, so in another order than that of the result.
        A request whose step fails gets an output with an error; no other does. Whatever is raised meanwhile, an
        interrupt or an error of a callback, ends all requests, and the next call finds everything in order.
        """
        jobs: dict[int, Job] = {}
        answers = [Answer(request.params.n) for request in requests]
        with self._turn, held_interrupts() as deliver_interrupt:

            def landed(plan: Plan, extended: Sequence[Job]) -> None:
                """Take note of what a step gave: times and rounds for the policy, outputs for the caller."""
                rounds = self._parts.runner.rounds.landed(plan.number, {job.request_id for job in extended})
                seconds, policy = self.statistics.step(plan, jobs), self._parts.policy
                if policy is not None:
                    policy.judged([(one.survival[: one.round_.judged], one.round_.accepted) for one in rounds])
                delayed = self._parts.runner.was_delayed(plan.number)
                if seconds is not None and policy is not None and not delayed:
                    policy.observe(plan.rows, len(plan.spans) if plan.drafting else 0, seconds)
                on_step([job.sequence for job in extended])
                for job in extended:
                    if job.sequence.finish_reason is not None:
                        self._ended(job, answers[owners[job.request_id]], on_output)
                deliver_interrupt()

            owners: dict[int, int] = {}
            try:
                for place, request in enumerate(requests):
                    for request_id in self._add(request, jobs):
                        owners[request_id] = place
                self.statistics.begin()
                self._loop(self._parts.scheduler, self._parts.runner, landed)
            finally:
                self._drop(jobs)
        return [answer.output() for answer in answers]

    def stand_by(self) -> bool:
        """Help other ranks with one step of theirs; False if they have none. No request may be running here."""
        return self._parts.runner.stand_by()

    @property
    def follows(self) -> bool:
        """Whether this rank only runs its part of another one's steps, by `follow`."""
        context = self._parts.context
        return context is not None and not context.leads

    def follow(self) -> bool:
        """Run a part of a step of the rank that leads; False if no rank has any."""
        context = self._parts.context
        return context is not None and context.follow()

    def record_rounds(self) -> list[Round]:
        """The list that gets the rounds of speculation from now on. ConfigError without drafts."""
        return self._parts.runner.record()

    def profile(self) -> tuple[str, Measured]:
        """Measure what rounds of speculation cost: the platform's name, and times. ConfigError without drafts."""
        with self._turn:
            return self._parts.runner.profile(sample_ids(self.tokenizer))

    def close(self) -> None:
        """Copy what is worth keeping to the tiers that survive the process."""
        with self._turn:
            self._parts.kv.persist()

    def _add(self, request: Request, jobs: dict[int, Job]) -> list[int]:
        """Queue all completions of a request; those after the first share the pages that it makes."""
        added: list[int] = []
        for completion in range(request.params.n):
            one = request
            if completion:
                seed = derived_seed(request.seed, completion)
                one = replace(request, completion=completion, seed=seed)
            request_id = self._parts.scheduler.add(one, after=added[0] if added else None)
            jobs[request_id] = self._parts.scheduler.job(request_id)
            self._parts.runner.admit(request_id, one)
            added.append(request_id)
        return added

    def _drop(self, jobs: Iterable[int]) -> None:
        """Let go of requests, ended or not; no step may be in flight."""
        for request_id in jobs:
            self._parts.scheduler.cancel(request_id)
            self._parts.runner.forget(request_id)
        self._parts.runner.rounds.forget()

    def _ended(self, job: Job, answer: Answer, on_output: Callable[[RequestOutput], None] | None) -> None:
        answer.take(job, completion_output(job, self.tokenizer, self._chat_format))
        if answer.complete and on_output is not None:
            on_output(answer.output())


def _image_limits(settings: EngineConfig) -> ImageLimits:
    return ImageLimits(
        settings.max_images,
        settings.max_image_bytes,
        settings.max_image_pixels,
        tuple(settings.image_url_hosts),
        settings.image_url_seconds,
    )
