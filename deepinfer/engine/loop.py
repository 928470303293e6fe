"""The engine's two loops over scheduler and runner, a dozen lines each: step by step, and one step ahead."""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from deepinfer.core.errors import RankError
from deepinfer.core.outputs import TokenLogprobs
from deepinfer.core.plan import Plan
from deepinfer.core.sampled import Sampled
from deepinfer.engine.scheduler import Job, Scheduler


class Runner(Protocol):
    """Carries plans out, in their order; `ModelRunner` is one."""

    def run(self, plan: Plan) -> Sampled:
        """The next token of every span to be sampled, in their order."""


OnStep = Callable[[Plan, Sequence[Job]], None]
"""Is told of a step that came back, and which jobs it extended or lost."""


def run_plain(scheduler: Scheduler, runner: Runner, on_step: OnStep) -> None:
    """Plan, run, commit, until there is no work."""
    while (plan := scheduler.plan()) is not None:
        on_step(plan, _land(scheduler, plan, _run(runner, plan)))


def run_ahead(scheduler: Scheduler, runner: Runner, on_step: OnStep) -> None:
    """Plan step n + 1 while n runs on another thread (and, on a GPU, on the device); commit n afterwards.

    Newest tokens stay on the device, so the plan does not need them; what a step computes for a request that turns out
    to have ended with the one before is dropped by the scheduler.
    """
    flying: deque[tuple[Plan, Future[Sampled]]] = deque()
    with ThreadPoolExecutor(1, "deepinfer-runner") as worker:
        try:
            while True:
                plan = scheduler.plan()
                if plan is not None:
                    flying.append((plan, worker.submit(runner.run, plan)))
                elif not flying:
                    return
                if len(flying) == 2 or plan is None:
                    landing, result = flying.popleft()
                    on_step(landing, _land(scheduler, landing, result))
        except BaseException as error:
            for plan, _ in flying:
                scheduler.fail(plan.number, _interrupted(error))
            raise


def _run(runner: Runner, plan: Plan) -> Future[Sampled]:
    """What a plan gave, or the exception that it raised, as a settled future."""
    result: Future[Sampled] = Future()
    try:
        result.set_result(runner.run(plan))
    except BaseException as error:
        result.set_exception(error)
    return result


def _land(scheduler: Scheduler, plan: Plan, result: Future[Sampled]) -> list[Job]:
    """Wait for a step and commit it; if it raised, have its requests fail and no others.

    An interrupt while it runs or is waited for goes on to the caller, but leaves no step in flight behind either.
    """
    sampled = [span.request_id for span in plan.spans if span.sample]
    try:
        drawn = result.result()
        tokens = dict(zip(sampled, drawn.lists(), strict=True))
        survival = drawn.chances()
        chances = {} if survival is None else dict(zip(sampled, survival, strict=True))
        logprobs = _by_request(sampled, drawn)
        prompts = [(part.request_id, part.first, part.logprobs.to_host()) for part in drawn.prompts]
    except RankError as error:  # no later step can run
        scheduler.fail(plan.number, error)
        raise
    except Exception as error:
        return scheduler.fail(plan.number, error)
    except BaseException as error:
        scheduler.fail(plan.number, _interrupted(error))
        raise
    for request_id, first, found in prompts:
        scheduler.take_prompt_logprobs(request_id, first, found)
    extended = scheduler.commit(plan.number, tokens, drawn.failures, chances)
    for job in extended:
        job.sequence.take_logprobs(logprobs.get(job.request_id, ()))
    return extended


def _by_request(sampled: Sequence[int], drawn: Sampled) -> dict[int, list[TokenLogprobs]]:
    """The log-probabilities of each request's new tokens, in their order, and perhaps of drafts that were rejected."""
    found: dict[int, list[TokenLogprobs]] = {}
    if drawn.logprobs is not None:
        for place, one in zip(drawn.logprob_rows, drawn.logprobs.to_host(), strict=True):
            found.setdefault(sampled[place], []).append(one)
    return found


def _interrupted(error: BaseException) -> RuntimeError:
    return RuntimeError(f"interrupted by {type(error).__name__}")
