"""Many ranks as one engine: the tokens of one process, and an end for all when one fails."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llm_tools import AGREE, alike, check_at_rest, texts, tokens
from PIL import Image

from deepinfer import LLM, ConfigError, SamplingParams
from deepinfer.core.errors import RankError
from deepinfer.core.outputs import RequestOutput
from deepinfer.engine.group import EngineGroup
from deepinfer.parallel.model import SharingModel
from deepinfer.parallel.ranks import Ranks, free_port

PROMPTS = sorted(texts(5, 14, 1, 150), key=len)  # the first are too short to be found in the prefix cache
PARAMS = [
    SamplingParams(temperature=(0, 0.8)[place % 2], max_tokens=3 + place % 14, ignore_eos=True, seq_seed=place)
    for place in range(len(PROMPTS))
]


@pytest.fixture(scope="module")
def alone(tiny_checkpoint: Path) -> list[RequestOutput]:
    return LLM(tiny_checkpoint).generate(PROMPTS, PARAMS, use_tqdm=False)


@pytest.fixture(scope="module")
def two(tiny_checkpoint: Path) -> Iterator[LLM]:
    """Two ranks that share the experts, two more of them than there are, and move them every few steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DEEPINFER_OVERRIDE_NUM_EXTRA_EXPERTS", "1")
        yield LLM(tiny_checkpoint, ep=2, rebalance_steps=3)


def group(llm: LLM) -> EngineGroup:
    assert isinstance(llm._engine, EngineGroup)
    return llm._engine


def children(llm: LLM) -> list[subprocess.Popen[bytes]]:
    return group(llm).children.processes


def check_leader_at_rest(llm: LLM) -> None:
    class Inner:
        _engine = group(llm)._engine

    check_at_rest(Inner)  # type: ignore[arg-type]


def test_two_ranks_give_the_tokens_of_one(two: LLM, alone: list[RequestOutput]) -> None:
    seen: list[int] = []
    outputs = two.generate(PROMPTS, PARAMS, use_tqdm=False, on_output=lambda output: seen.append(output.index))
    assert alike(outputs, alone) >= AGREE
    assert [output.prompt_token_ids for output in outputs] == [tuple(prompt) for prompt in PROMPTS]
    assert sorted(seen) == list(range(len(PROMPTS)))
    statistics = two.statistics.scheduler
    assert statistics.finished == len(PROMPTS)
    assert statistics.generated_tokens == sum(len(output.token_ids) for output in outputs)
    model = group(two)._engine._parts.runner._model
    assert isinstance(model, SharingModel)
    assert model.weights.layers[0].experts.w13.shape[0] == 3  # of four experts, and two copies, half are here
    assert model._balancer.moved > 0
    assert [len(layer.codes) for layer in model.weights.engrams.values()] == [320]  # of 640 rows
    visits = two.statistics.expert_visits
    assert visits is not None
    assert visits[0].sum() >= 2 * statistics.prefill_rows  # both ranks' rows, two experts each
    check_leader_at_rest(two)


def test_drafts_of_both_ranks_change_no_token(two: LLM, tiny_checkpoint: Path) -> None:
    before = sum(two.statistics.speculation.verified)
    prompts = texts(41, 6, 20, 60)
    outputs = two.generate(prompts, PARAMS[:6], use_tqdm=False)
    assert sum(two.statistics.speculation.verified) > before
    assert tokens(outputs) == tokens(LLM(tiny_checkpoint, nextn=0).generate(prompts, PARAMS[:6], use_tqdm=False))


def test_images_on_both_ranks(two: LLM, tiny_checkpoint: Path) -> None:
    """One of them in two requests; a request without any between them."""
    source = np.random.default_rng(0)
    pictures = [Image.fromarray(source.integers(0, 256, (30 + 9 * n, 44, 3), dtype=np.uint8)) for n in range(3)]
    text = {"type": "text", "text": "What is it?"}
    chats: list[Any] = [
        [{"role": "user", "content": [*({"type": "image", "image": pictures[n]} for n in shown), text]}]
        for shown in ([0], [1, 2], [], [2], [0, 1])
    ]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    outputs, alone = (llm.chat(chats, params, use_tqdm=False) for llm in (two, LLM(tiny_checkpoint)))
    assert tokens(outputs) == tokens(alone)
    pictures_seen = two.statistics.pictures
    assert pictures_seen is not None
    assert pictures_seen.encoded >= 3


@pytest.mark.parametrize("count", [0, 1, 3])
def test_few_requests_leave_ranks_idle(two: LLM, alone: list[RequestOutput], count: int) -> None:
    outputs = two.generate(PROMPTS[:count], PARAMS[:count], use_tqdm=False)
    assert tokens(outputs) == tokens(alone[:count])


def test_a_prompt_comes_back_to_the_rank_that_read_it(two: LLM) -> None:
    long = texts(6, 4, 180, 200)
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    two.generate(long, params, use_tqdm=False)
    again = two.generate(long[::-1], params, use_tqdm=False)
    assert all(output.cached_tokens >= 128 for output in again)


def test_a_bad_prompt_harms_no_other(two: LLM, alone: list[RequestOutput]) -> None:
    outputs = two.generate([PROMPTS[0], [-1], PROMPTS[2]], PARAMS[:1] * 3, use_tqdm=False, on_error="return")
    assert outputs[0].token_ids == alone[0].token_ids
    assert outputs[1].error is not None
    assert outputs[2].token_ids == alone[2].token_ids[: PARAMS[0].max_tokens]


def test_completions_grammars_and_chats_on_any_rank(two: LLM, tiny_checkpoint: Path) -> None:
    params = [
        SamplingParams(1, max_tokens=12, seq_seed=1, n=3),
        SamplingParams(1, max_tokens=12, seq_seed=2, so_args={"regex": "[ab]{3}c"}),
        SamplingParams(0, max_tokens=12, so_args={"json_schema": {"type": "boolean"}}),
        SamplingParams(0, max_tokens=12, stop_token_ids=range(0, 256, 5)),
    ]
    chats = [[{"role": "user", "content": f"Count to {number}."}] for number in range(4)]
    outputs = two.chat(chats, params, thinking=False, use_tqdm=False)
    alone = LLM(tiny_checkpoint).chat(chats, params, thinking=False, use_tqdm=False)
    assert tokens(outputs) == tokens(alone)
    assert [one.text for one in outputs[0].outputs] == [one.text for one in alone[0].outputs]
    assert outputs[1].text.strip("abc") == ""
    assert outputs[2].text in ("true", "false")
    assert [output.outputs[0].content for output in outputs] == [output.outputs[0].content for output in alone]


def test_what_a_callback_raises_ends_the_call_and_no_more(two: LLM, alone: list[RequestOutput]) -> None:
    def interrupt(output: RequestOutput) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        two.generate(PROMPTS, PARAMS, use_tqdm=False, on_output=interrupt)
    check_leader_at_rest(two)
    assert tokens(two.generate(PROMPTS[:3], PARAMS[:3], use_tqdm=False)) == tokens(alone[:3])


def test_a_killed_rank_ends_all_with_its_error(two: LLM) -> None:
    """The last test of this engine."""
    victim = children(two)[0]
    began = time.monotonic()

    def kill(output: RequestOutput) -> None:
        os.kill(victim.pid, signal.SIGKILL)

    with pytest.raises(RankError, match="rank 1 of 2 was ended by signal 9"):
        two.generate(PROMPTS * 8, PARAMS * 8, use_tqdm=False, on_output=kill)
    assert time.monotonic() - began < 30
    with pytest.raises(RankError, match="signal 9"):
        two.generate(PROMPTS, PARAMS, use_tqdm=False)


@pytest.mark.slow
def test_four_ranks(tiny_checkpoint: Path, alone: list[RequestOutput]) -> None:
    llm = LLM(tiny_checkpoint, dp=4, asynchronous=False, engram_tables="host")
    assert alike(llm.generate(PROMPTS, PARAMS, use_tqdm=False), alone) >= AGREE

    def fail(*_: Any) -> Any:
        raise ValueError("a step that goes wrong")

    model = group(llm)._engine._parts.runner._model
    model.experts = [fail] * len(model.experts)
    with pytest.raises(RankError, match="rank 0 of 4 failed: ValueError: a step that goes wrong"):
        llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    for child in children(llm):
        assert child.wait(timeout=10) != 0


def test_batch_invariant_ranks_give_the_bits_of_one_process(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-probabilities to the last bit, whatever the rows of a step and wherever the experts lie."""
    monkeypatch.setenv("DEEPINFER_BATCH_INVARIANT", "1")
    monkeypatch.setenv("DEEPINFER_OVERRIDE_NUM_EXTRA_EXPERTS", "2")
    params = [
        SamplingParams(place % 2, max_tokens=6, ignore_eos=True, seq_seed=place, logprobs=2) for place in range(8)
    ]
    one = LLM(tiny_checkpoint).generate(PROMPTS[-8:], params, use_tqdm=False)
    two = LLM(tiny_checkpoint, ep=2, rebalance_steps=2).generate(PROMPTS[-8:], params, use_tqdm=False)
    assert tokens(two) == tokens(one)
    assert [output.outputs[0].logprobs for output in two] == [output.outputs[0].logprobs for output in one]


def test_tables_on_the_host_give_the_same(tiny_checkpoint: Path, alone: list[RequestOutput]) -> None:
    llm = LLM(tiny_checkpoint, engram_tables="host")
    assert tokens(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == tokens(alone)
    with pytest.raises(ConfigError, match="engram_tables is 'disk'; it takes device or host"):
        LLM(tiny_checkpoint, engram_tables="disk")


def test_replicas_share_nothing(tiny_checkpoint: Path, alone: list[RequestOutput]) -> None:
    llm = LLM(tiny_checkpoint, dp=2, ep=1)
    assert tokens(llm.generate(PROMPTS[:6], PARAMS[:6], use_tqdm=False)) == tokens(alone[:6])
    started = children(llm)
    llm.close()
    del llm
    assert [child.wait(timeout=10) for child in started] == [0]


def test_what_every_rank_would_refuse_is_refused(tiny_checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="cp is 2; it must divide ep, which is 3"):
        LLM(tiny_checkpoint, cp=2, ep=3)
    with pytest.raises(ConfigError, match="ep is 0; it takes a whole number >= 1, or None"):
        LLM(tiny_checkpoint, ep=0)


SCRIPT = """
import sys
from deepinfer import LLM, SamplingParams
llm = LLM(sys.argv[1])
params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
outputs = llm.generate([[n, n + 1, n + 2] for n in range(5)], params, use_tqdm=False)
print(f"#{[list(output.token_ids) for output in outputs]}#{llm.statistics.scheduler.finished}", flush=True)
"""


@pytest.mark.slow
def test_launchers_of_torchrun_all_return_everything(tiny_checkpoint: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", str(script)]
    done = subprocess.run([*command, str(tiny_checkpoint)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"#(\[\[.*?\]\])#", done.stdout)  # two may stand on one line
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    one = LLM(tiny_checkpoint).generate([[n, n + 1, n + 2] for n in range(5)], params, use_tqdm=False)
    assert found == [str([list(output.token_ids) for output in one])] * 2


def test_the_reason_of_a_failure_reaches_all() -> None:
    """Two ends in threads: one fails while it works alone, the other waits for something that never comes."""
    port, listener = free_port()
    told = threading.Event()
    first = Ranks(0, 2, "127.0.0.1", port, listener=listener)
    second = Ranks(1, 2, "127.0.0.1", port, on_failure=lambda _: told.set())
    with pytest.raises(RankError, match="rank 0 of 2 failed: ZeroDivisionError"), first.together():
        print(1 // 0)
    with pytest.raises(RankError, match="rank 0 of 2 failed: ZeroDivisionError"):
        second.take("never")
    assert told.wait(5)
    with pytest.raises(RankError), second.together():
        pass
    for end in (second, first):
        end.close()
