"""Faults in the middle: a step that raises, Ctrl-C at any place, a broken terminal; and that nothing piles up."""

import gc
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from llm_tools import AGREE, Oracle, alike, caches_of, check_at_rest, parts, texts, tokens
from PIL import Image

from deepinfer import LLM, EngineError, RequestOutput, SamplingParams
from deepinfer.cache.manager import KVManager
from deepinfer.core.plan import Plan
from deepinfer.core.sampled import Sampled
from deepinfer.engine.model_runner import ModelRunner
from deepinfer.engine.progress import Progress
from deepinfer.engine.scheduler import Scheduler

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPTS = texts(9, 9, 20, 90)
LOOPS = pytest.mark.parametrize("asynchronous", [True, False], ids=["asynchronous", "plain"])


@pytest.fixture(scope="module")
def oracle(tiny_checkpoint: Path) -> Oracle:
    return Oracle(tiny_checkpoint)


@pytest.fixture(scope="module")
def expected(tiny_checkpoint: Path) -> list[RequestOutput]:
    return LLM(tiny_checkpoint, prefix_cache=False).generate(PROMPTS, GREEDY, use_tqdm=False)


class Fault:
    """Makes the runner's n-th step (from now on) raise, before or after it has touched the caches."""

    def __init__(self, patch: pytest.MonkeyPatch, step: int, error: BaseException, late: bool = False) -> None:
        self.hit: set[int] = set()
        self.steps = 0
        run = ModelRunner.run

        def broken(runner: ModelRunner, plan: Plan) -> Sampled:
            self.steps += 1
            if self.steps != step + 1:
                return run(runner, plan)
            self.hit = {span.request_id for span in plan.spans}
            if late:
                run(runner, plan)
            raise error

        patch.setattr(ModelRunner, "run", broken)


@LOOPS
@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("step", [0, 1, 9])
def test_a_step_that_raises_loses_its_own_requests_only(
    tiny_checkpoint: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch, asynchronous: bool, late: bool, step: int
) -> None:
    llm = LLM(tiny_checkpoint, max_num_seqs=4, max_chunk=40, asynchronous=asynchronous)
    fault = Fault(monkeypatch, step, torch.OutOfMemoryError("no room for scores"), late)
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    lost = [output for output in outputs if output.error is not None]
    assert {output.index for output in lost} == fault.hit
    assert 1 <= len(lost) <= 4
    for output in lost:
        assert isinstance(output.error, EngineError)
        assert str(output.error) == "a step of the model failed: OutOfMemoryError: no room for scores"
        assert (output.finish_reason, output.prompt_token_ids) == ("error", tuple(PROMPTS[output.index]))
    good = [output for output in outputs if output.error is None]
    assert oracle.agreement(good) >= AGREE
    assert llm.statistics.scheduler.failed == len(lost)
    check_at_rest(llm)
    again = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert oracle.agreement([output for output in again if not output.cached_tokens]) >= AGREE
    assert all(output.error is None for output in again)
    check_at_rest(llm)


def test_tokens_before_the_fault_are_given(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(tiny_checkpoint, asynchronous=False)
    whole = llm.generate("Once", GREEDY, use_tqdm=False)[0]
    Fault(monkeypatch, 4, ValueError("broken"))
    part = llm.generate("Once", GREEDY, use_tqdm=False)[0]
    assert part.token_ids == whole.token_ids[:4]
    assert whole.text.startswith(part.text)


def test_the_progress_bar_counts_lost_requests(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llm = LLM(tiny_checkpoint, asynchronous=False)
    Fault(monkeypatch, 3, ValueError("broken"))
    llm.generate(["one", "two"], GREEDY)
    shown = capsys.readouterr().err
    assert "2/2" in shown
    assert " 6 tokens" in shown


def interrupting(place: Any, name: str, after: int) -> Callable[..., Any]:
    """The method, with a Ctrl-C amid its n-th call."""
    method, calls = getattr(place, name), [0]

    def interrupted(*arguments: Any, **keywords: Any) -> Any:
        calls[0] += 1
        if calls[0] == after:
            signal.raise_signal(signal.SIGINT)
        return method(*arguments, **keywords)

    return interrupted


PLACES = [
    (ModelRunner, "run"),
    (Scheduler, "plan"),
    (Scheduler, "commit"),
    (KVManager, "admit"),
    (KVManager, "publish"),
]


@LOOPS
@pytest.mark.parametrize("after", [1, 4])
@pytest.mark.parametrize(("place", "name"), PLACES, ids=[name for _, name in PLACES])
def test_an_interrupt_leaves_everything_in_order(
    tiny_checkpoint: Path, expected: list[RequestOutput], asynchronous: bool, place: Any, name: str, after: int
) -> None:
    llm = LLM(tiny_checkpoint, max_num_seqs=4, asynchronous=asynchronous)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(place, name, interrupting(place, name, after))
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    check_at_rest(llm)
    assert llm.statistics.scheduler.ended == len(PROMPTS)
    assert llm.statistics.scheduler.finished < len(PROMPTS)
    again = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    cold = [output.index for output in again if not output.cached_tokens]
    assert alike([again[place] for place in cold], [expected[place] for place in cold]) > 0.8
    check_at_rest(llm)


@LOOPS
def test_interrupts_at_any_time(tiny_checkpoint: Path, oracle: Oracle, asynchronous: bool) -> None:
    """As a user sends them: from outside, after a random while; most come while a step runs."""
    llm = LLM(tiny_checkpoint, max_num_seqs=4, max_chunk=30, asynchronous=asynchronous)
    source, interrupted = random.Random(4), 0
    begin = time.perf_counter()
    llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    usual = time.perf_counter() - begin
    for _ in range(4):
        timer = threading.Timer(source.uniform(0, 0.7 * usual), os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        try:
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)
            timer.join()
        except KeyboardInterrupt:
            interrupted += 1
        check_at_rest(llm)
    assert interrupted > 0
    outputs = llm.generate(texts(10, 4, 5, 60), GREEDY, use_tqdm=False)
    assert oracle.agreement(outputs) >= AGREE


@LOOPS
@pytest.mark.parametrize("step", [0, 3])
def test_an_interrupt_raised_by_the_step_itself(
    tiny_checkpoint: Path, expected: list[RequestOutput], asynchronous: bool, step: int
) -> None:
    llm = LLM(tiny_checkpoint, max_num_seqs=4, asynchronous=asynchronous)
    with pytest.MonkeyPatch.context() as patch:
        Fault(patch, step, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    check_at_rest(llm)
    assert alike(llm.generate(PROMPTS[:4], GREEDY, use_tqdm=False), expected[:4]) == 1


@LOOPS
def test_a_broken_terminal_stops_the_call_and_nothing_else(
    tiny_checkpoint: Path, expected: list[RequestOutput], asynchronous: bool
) -> None:
    llm = LLM(tiny_checkpoint, max_num_seqs=4, asynchronous=asynchronous)

    def broken(*arguments: Any) -> None:
        raise BrokenPipeError("nobody reads")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Progress, "step", broken)
        with pytest.raises(BrokenPipeError):
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    check_at_rest(llm)
    assert alike(llm.generate(PROMPTS[:4], GREEDY, use_tqdm=False), expected[:4]) == 1


def test_calls_from_other_threads_take_turns(tiny_checkpoint: Path, expected: list[RequestOutput]) -> None:
    """There signals cannot be handled; the calls work all the same."""
    llm = LLM(tiny_checkpoint, prefix_cache=False)
    found: dict[int, list[RequestOutput]] = {}

    def call(start: int) -> None:
        found[start] = llm.generate(PROMPTS[start : start + 3], GREEDY, use_tqdm=False)

    threads = [threading.Thread(target=call, args=(start,)) for start in range(0, 9, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert alike([output for start in sorted(found) for output in found[start]], expected) >= 8 / 9
    check_at_rest(llm)


@LOOPS
def test_nothing_piles_up(tiny_checkpoint: Path, asynchronous: bool) -> None:
    """A hundred requests, with images, failures and a full prefix cache: no object stays behind."""
    llm = LLM(
        tiny_checkpoint, max_num_seqs=8, page_size=16, cache_bytes=caches_of(tiny_checkpoint, 40, 8, 16),
        asynchronous=asynchronous, host_cache_bytes=20_000,
    )  # fmt: skip
    short = SamplingParams(temperature=0, max_tokens=3)
    image = Image.new("RGB", (30, 20))

    def work(seed: int) -> None:
        outputs = llm.generate(texts(seed, 21, 1, 60), short, use_tqdm=False)
        chat = [{"role": "user", "content": [{"type": "image", "image": image}]}]
        assert len(tokens(outputs + llm.chat([chat] * 4, short, use_tqdm=False))) == 25
        with pytest.MonkeyPatch.context() as patch:
            Fault(patch, 0, ValueError("broken"))
            assert llm.generate("lost", short, use_tqdm=False)[0].error is not None
        check_at_rest(llm)

    def objects() -> int:
        gc.collect()
        return len(gc.get_objects())

    work(0)  # fills the prefix cache and the tier
    work(1)
    before, evicted = objects(), len(parts(llm).kv._tree._evicted)
    for seed in range(2, 4):
        work(seed)
    remembered = len(parts(llm).kv._tree._evicted) - evicted  # digests, of which a bounded number is kept
    assert objects() - before < 100 + remembered
    assert llm.statistics.scheduler.finished == 100
