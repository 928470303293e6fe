"""A loaded model and the way of its requests: admission, steps, replies."""

from collections.abc import Callable, Sequence
from pathlib import Path

from deepinfer.config.engine import EngineConfig
from deepinfer.config.envs import Environment
from deepinfer.core.errors import EngineError, RequestError
from deepinfer.core.outputs import RequestOutput
from deepinfer.core.plan import Plan
from deepinfer.core.request import Request
from deepinfer.engine.admission import Admission
from deepinfer.engine.assembly import assemble
from deepinfer.engine.loop import run_ahead, run_plain
from deepinfer.engine.replies import request_output
from deepinfer.engine.scheduler import Job
from deepinfer.engine.sequence import Sequence as Running
from deepinfer.engine.statistics import EngineStatistics
from deepinfer.text.chat import ChatFormat


class Engine:
    """Owns the weights and caches of one checkpoint; the only object that runs them. Not thread-safe."""

    def __init__(self, directory: Path, environment: Environment, settings: EngineConfig) -> None:
        """Load the checkpoint in `directory`; CheckpointError or ConfigError if it or the settings will not do."""
        self._parts = assemble(directory, environment, settings)
        self._loop = run_ahead if settings.asynchronous else run_plain
        self.config, self.tokenizer = self._parts.config, self._parts.tokenizer
        self._chat_format = ChatFormat(self.tokenizer)
        self.admission = Admission(self.config, self.tokenizer, self._chat_format)
        self.statistics = EngineStatistics(self._parts.scheduler.statistics, self._parts.kv.statistics)
        self._leaving: list[Job] = []

    def run(self, requests: Sequence[Request], on_step: Callable[[list[Running]], None]) -> list[RequestOutput]:
        """Answer `requests`, in their order; `on_step` gets the sequences that a step extended or lost.

        A request that the caches can never hold, or whose step fails, gets an output with an error; no other does.
        """
        outputs: dict[int, RequestOutput] = {}
        jobs: dict[int, tuple[int, Job]] = {}
        for place, request in enumerate(requests):
            try:
                job = self._add(request)
                jobs[job.request_id] = place, job
            except RequestError as error:
                outputs[place] = RequestOutput.failed(request.index, error)

        def landed(plan: Plan, extended: Sequence[Job]) -> None:
            self.statistics.step(plan)
            on_step([job.sequence for job in extended])
            for job in extended:
                if job.sequence.finish_reason is not None:
                    outputs[jobs[job.request_id][0]] = self._output(job)
            self._forget([job for job in extended if job.sequence.finish_reason is not None])

        self.statistics.begin()
        try:
            self._loop(self._parts.scheduler, self._parts.runner, landed)
        except BaseException:
            self._forget([job for _, job in jobs.values() if self._parts.scheduler.cancel(job.request_id)])
            raise
        finally:
            self._forget([])
        return [outputs[place] for place in range(len(requests))]

    def close(self) -> None:
        """Copy what is worth keeping to the tiers that survive the process."""
        self._parts.kv.persist()

    def _add(self, request: Request) -> Job:
        request_id = self._parts.scheduler.add(request)
        self._parts.runner.admit(request_id, request)
        return self._parts.scheduler.job(request_id)

    def _forget(self, ended: Sequence[Job]) -> None:
        """Let the runner drop requests that have ended, each once no step in flight holds rows of it."""
        self._leaving += ended
        staying = []
        for job in self._leaving:
            if job.in_flight:
                staying.append(job)
            else:
                self._parts.runner.forget(job.request_id)
        self._leaving = staying

    def _output(self, job: Job) -> RequestOutput:
        error = None
        if job.error is not None:
            error = EngineError(f"a step of the model failed: {type(job.error).__name__}: {job.error}")
        return request_output(job, error, self.tokenizer, self._chat_format)
