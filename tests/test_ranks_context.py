"""Ranks that share prompts (cp): the tokens of one process, with everything that requests may ask for."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llm_tools import AGREE, alike, caches_of, check_at_rest, texts, tokens
from PIL import Image
from test_ranks import SCRIPT, children, group

from deepinfer import LLM, RequestOutput, SamplingParams
from deepinfer.core.errors import RankError
from deepinfer.parallel import context

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = sorted(texts(15, 9, 1, 400), key=len)
PARAMS = [
    SamplingParams(temperature=(0, 0.8)[place % 2], max_tokens=5 + place, ignore_eos=True, seq_seed=place)
    for place in range(len(PROMPTS))
]
SMALL = {"max_num_batched_tokens": 256}  # so that prompts run in several steps, beside decoding requests


@pytest.fixture(scope="module")
def one(tiny_checkpoint: Path) -> LLM:
    return LLM(tiny_checkpoint, **SMALL)


@pytest.fixture(scope="module")
def alone(one: LLM) -> list[RequestOutput]:
    return one.generate(PROMPTS, PARAMS, use_tqdm=False)


@pytest.fixture(scope="module")
def warm(one: LLM, alone: list[RequestOutput]) -> list[RequestOutput]:
    """The same behind cached prefixes, which is not the same to the bit."""
    return one.generate(PROMPTS, PARAMS, use_tqdm=False)


@pytest.fixture(scope="module")
def two(tiny_checkpoint: Path) -> LLM:
    """Two ranks that share prompts and experts."""
    return LLM(tiny_checkpoint, cp=2, **SMALL)


def check_group_at_rest(llm: LLM) -> None:
    class Inner:
        _engine = group(llm)._engine

    check_at_rest(Inner)  # type: ignore[arg-type]


def test_two_ranks_give_the_tokens_of_one(two: LLM, alone: list[RequestOutput], warm: list[RequestOutput]) -> None:
    """With drafts, which the tiny checkpoint has; then again, behind prefixes that are cached."""
    outputs = two.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert alike(outputs, alone) >= AGREE
    statistics = two.statistics
    assert statistics.scheduler.finished == len(PROMPTS)
    assert statistics.speculation is not None
    check_group_at_rest(two)
    again = two.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert [output.cached_tokens for output in again] == [output.cached_tokens for output in warm]
    assert sum(output.cached_tokens >= 64 for output in again) >= 5
    assert alike(again, warm) >= AGREE


def test_grammars_scores_and_completions(two: LLM, one: LLM) -> None:
    params = [
        SamplingParams(1, max_tokens=9, seq_seed=1, n=3),
        SamplingParams(1, max_tokens=9, seq_seed=2, so_args={"regex": "[ab]{3}c"}),
        SamplingParams(0, max_tokens=9, so_args={"json_schema": {"type": "boolean"}}),
        SamplingParams(0, max_tokens=5, logprobs=2, prompt_logprobs=1, ignore_eos=True),
    ]
    # The last one's rows all run the decoder half, which ranks share where it has so many.
    prompts = [*texts(16, 3, 90, 150), *texts(17, 1, 600, 600)]
    outputs, wanted = (llm.generate(prompts, params, use_tqdm=False) for llm in (two, one))
    assert [[c.token_ids for c in output.outputs] for output in outputs] == [
        [c.token_ids for c in output.outputs] for output in wanted
    ]
    assert outputs[1].text.strip("abc") == ""
    assert outputs[2].text in ("true", "false")
    mine, others = (output[3].prompt_logprobs for output in (outputs, wanted))
    assert mine is not None
    assert others is not None
    for made, expected in zip(mine[1:], others[1:], strict=True):
        assert made is not None
        assert expected is not None
        assert made.logprob == pytest.approx(expected.logprob, abs=0.05)


def test_images(two: LLM, one: LLM) -> None:
    """The rank that leads encodes them; the others get their embeddings."""
    source = np.random.default_rng(0)
    pictures = [Image.fromarray(source.integers(0, 256, (30 + 9 * n, 44, 3), dtype=np.uint8)) for n in range(3)]
    filler = {"type": "text", "text": "What is to be seen here? " * 4}
    chats: list[list[dict[str, Any]]] = [
        [{"role": "user", "content": [filler, *({"type": "image", "image": each} for each in pictures[:count])]}]
        for count in (1, 0, 3, 2)
    ]
    outputs, wanted = (llm.chat(chats, GREEDY, use_tqdm=False) for llm in (two, one))
    assert tokens(outputs) == tokens(wanted)


@pytest.mark.slow
def test_pages_come_back_from_the_host(tiny_checkpoint: Path) -> None:
    """What was evicted to host memory is loaded on every rank."""
    settings: dict[str, Any] = {"cache_bytes": caches_of(tiny_checkpoint, 16), "host_cache_bytes": 1 << 24}
    prompts = texts(17, 4, 330, 400)
    llm = LLM(tiny_checkpoint, cp=2, ep=1, **settings)
    first = llm.generate(prompts, GREEDY, use_tqdm=False)
    again = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert llm.statistics.cache.loaded_pages.total() > 0
    alone = LLM(tiny_checkpoint, **settings)
    assert alike(first, alone.generate(prompts, GREEDY, use_tqdm=False)) >= AGREE
    assert alike(again, alone.generate(prompts, GREEDY, use_tqdm=False)) >= AGREE


def test_what_a_callback_raises_ends_the_call_and_no_more(two: LLM, warm: list[RequestOutput]) -> None:
    def interrupt(output: RequestOutput) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        two.generate(PROMPTS, PARAMS, use_tqdm=False, on_output=interrupt)
    check_group_at_rest(two)
    assert tokens(two.generate(PROMPTS[:3], PARAMS[:3], use_tqdm=False)) == tokens(warm[:3])


def test_batch_invariant_ranks_give_the_bits_of_one_process(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-probabilities to the last bit, wherever rows ran."""
    monkeypatch.setenv("DEEPINFER_BATCH_INVARIANT", "1")
    params = [
        SamplingParams(place % 2, max_tokens=6, ignore_eos=True, seq_seed=place, logprobs=2) for place in range(4)
    ]
    wanted = LLM(tiny_checkpoint).generate(PROMPTS[-4:], params, use_tqdm=False)
    outputs = LLM(tiny_checkpoint, cp=2, ep=1, **SMALL).generate(PROMPTS[-4:], params, use_tqdm=False)
    assert tokens(outputs) == tokens(wanted)
    assert [output.outputs[0].logprobs for output in outputs] == [output.outputs[0].logprobs for output in wanted]


def check_golden(golden_checkpoint: Path, layout: dict[str, int]) -> None:
    prompts = [[7 + (5 * place + number) % 400 for place in range(70 + 9 * number)] for number in range(3)]
    outputs = LLM(golden_checkpoint, **layout).generate(prompts, GREEDY, use_tqdm=False)
    assert tokens(outputs) == tokens(LLM(golden_checkpoint).generate(prompts, GREEDY, use_tqdm=False))


def check_bundled(layout: dict[str, int]) -> None:
    """Trained, so that drafts are accepted; one prompt is long enough to be cut."""
    long = " ".join(f"Room {number} holds {number * 7 % 90} chairs." for number in range(12))
    chats: list[Any] = [
        [{"role": "user", "content": content}]
        for content in ("What is 47 + 38?", long + " How many chairs are in room 3?", "Find the sum of 346 and 187.")
    ]
    params = SamplingParams(temperature=0, max_tokens=24)
    many = LLM(**layout)
    outputs, wanted = (llm.chat(chats, params, thinking=False, use_tqdm=False) for llm in (many, LLM()))
    assert tokens(outputs) == tokens(wanted)
    assert sum(many.statistics.speculation.accepted) > 0


def test_golden(golden_checkpoint: Path) -> None:
    check_golden(golden_checkpoint, {"cp": 2})


def test_the_bundled_checkpoint() -> None:
    check_bundled({"cp": 2, "dp": 1, "ep": 1})


def test_a_killed_rank_ends_all_with_its_error(two: LLM) -> None:
    """The last test of this engine."""
    victim = children(two)[0]
    began = 0.0

    def kill(output: RequestOutput) -> None:
        nonlocal began
        began = began or time.monotonic()
        os.kill(victim.pid, signal.SIGKILL)

    with pytest.raises(RankError, match="rank 1 of 2 was ended by signal 9"):
        two.generate(PROMPTS * 4, PARAMS * 4, use_tqdm=False, on_output=kill)
    assert time.monotonic() - began < 10


@pytest.mark.slow
def test_confidence_decides_how_many_drafts_are_verified(tiny_checkpoint: Path, alone: list[RequestOutput]) -> None:
    llm = LLM(tiny_checkpoint, cp=2, varlen=True, **SMALL)
    assert alike(llm.generate(PROMPTS, PARAMS, use_tqdm=False), alone) >= AGREE


@pytest.mark.slow
def test_launchers_of_torchrun(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """One of the two launchers only follows; both return all outputs."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("LLM(sys.argv[1])", "LLM(sys.argv[1], cp=2)"), encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", str(script)]
    done = subprocess.run([*command, str(tiny_checkpoint)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"#(\[\[.*?\]\])#", done.stdout)  # two may stand on one line
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    one = LLM(tiny_checkpoint).generate([[n, n + 1, n + 2] for n in range(5)], params, use_tqdm=False)
    assert found == [str([list(output.token_ids) for output in one])] * 2


LAYOUTS = {
    "cp 4": {"cp": 4},
    "dp 2, cp 2": {"dp": 2, "cp": 2},
    "dp 2, cp 2, nothing shared": {"dp": 2, "cp": 2, "ep": 1},
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
def test_four_ranks(
    tiny_checkpoint: Path, alone: list[RequestOutput], warm: list[RequestOutput], layout: dict[str, int]
) -> None:
    llm = LLM(tiny_checkpoint, **layout, **SMALL, rebalance_steps=3)
    for wanted in (alone, warm):
        assert alike(llm.generate(PROMPTS, PARAMS, use_tqdm=False), wanted) >= 0.85
    assert len(PROMPTS[-1]) >= 8 * context.LEAST_PIECE  # long enough to be cut for four
    victim = children(llm)[-1]
    os.kill(victim.pid, signal.SIGKILL)
    with pytest.raises(RankError, match="rank 3 of 4 was ended by signal 9"):
        llm.generate(PROMPTS, PARAMS, use_tqdm=False)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
def test_golden_and_bundled_checkpoints_on_four_ranks(golden_checkpoint: Path, layout: dict[str, int]) -> None:
    check_golden(golden_checkpoint, layout)
    check_bundled(layout)


@pytest.mark.slow
def test_four_batch_invariant_ranks_that_share_everything(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEPINFER_BATCH_INVARIANT", "1")
    monkeypatch.setenv("DEEPINFER_OVERRIDE_NUM_EXTRA_EXPERTS", "4")
    params = [SamplingParams(0, max_tokens=6, ignore_eos=True, logprobs=2) for _ in PROMPTS]
    wanted = LLM(tiny_checkpoint).generate(PROMPTS, params, use_tqdm=False)
    outputs = LLM(tiny_checkpoint, dp=2, cp=2, rebalance_steps=2).generate(PROMPTS, params, use_tqdm=False)
    assert tokens(outputs) == tokens(wanted)
    assert [output.outputs[0].logprobs for output in outputs] == [output.outputs[0].logprobs for output in wanted]
