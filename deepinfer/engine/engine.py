"""A loaded model and the way of its requests: admission, steps, replies."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from threading import Lock

from deepinfer.config.engine import EngineConfig
from deepinfer.config.envs import Environment
from deepinfer.core.errors import EngineError
from deepinfer.core.outputs import RequestOutput
from deepinfer.core.plan import Plan
from deepinfer.core.request import Request
from deepinfer.engine.admission import Admission
from deepinfer.engine.assembly import assemble
from deepinfer.engine.interrupts import held_interrupts
from deepinfer.engine.loop import run_ahead, run_plain
from deepinfer.engine.replies import request_output
from deepinfer.engine.scheduler import Job
from deepinfer.engine.sequence import Sequence as Running
from deepinfer.engine.statistics import EngineStatistics
from deepinfer.text.chat import ChatFormat


class Engine:
    """Owns the weights and caches of one checkpoint; the only object that runs them. Callers take turns."""

    def __init__(self, directory: Path, environment: Environment, settings: EngineConfig) -> None:
        """Load the checkpoint in `directory`; CheckpointError or ConfigError if it or the settings will not do."""
        self._parts = assemble(directory, environment, settings)
        self._loop = run_ahead if settings.asynchronous else run_plain
        self.config, self.tokenizer = self._parts.config, self._parts.tokenizer
        self._chat_format = ChatFormat(self.tokenizer)
        capacity = self._parts.kv.total_pages * self._parts.kv.page_size
        self._turn = Lock()
        self.admission = Admission(self.config, self.tokenizer, self._chat_format, capacity)
        self.statistics = EngineStatistics(self._parts.scheduler.statistics, self._parts.kv.statistics)

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
        outputs: dict[int, RequestOutput] = {}
        with self._turn, held_interrupts() as deliver_interrupt:

            def landed(plan: Plan, extended: Sequence[Job]) -> None:
                self.statistics.step(plan, jobs)
                on_step([job.sequence for job in extended])
                for job in extended:
                    if job.sequence.finish_reason is not None:
                        outputs[job.request_id] = self._output(job)
                        if on_output is not None:
                            on_output(outputs[job.request_id])
                deliver_interrupt()

            try:
                for request in requests:
                    self._add(request, jobs)
                self.statistics.begin()
                self._loop(self._parts.scheduler, self._parts.runner, landed)
            finally:
                self._drop(jobs)
        return [outputs[request_id] for request_id in jobs]

    def close(self) -> None:
        """Copy what is worth keeping to the tiers that survive the process."""
        with self._turn:
            self._parts.kv.persist()

    def _add(self, request: Request, jobs: dict[int, Job]) -> None:
        request_id = self._parts.scheduler.add(request)
        jobs[request_id] = self._parts.scheduler.job(request_id)
        self._parts.runner.admit(request_id, request)

    def _drop(self, jobs: Iterable[int]) -> None:
        """Let go of requests, ended or not; no step may be in flight."""
        for request_id in jobs:
            self._parts.scheduler.cancel(request_id)
            self._parts.runner.forget(request_id)

    def _output(self, job: Job) -> RequestOutput:
        error = None
        if job.error is not None:
            error = EngineError(f"a step of the model failed: {type(job.error).__name__}: {job.error}")
        return request_output(job, error, self.tokenizer, self._chat_format)
