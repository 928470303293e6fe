"""Outputs one by one, while the rest of a batch still runs."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from llm_tools import check_at_rest, texts

from deepinfer import LLM, RequestError, RequestOutput, SamplingParams

PROMPTS = texts(4, 9, 5, 60)
LENGTHS = [9, 2, 5, 1, 12, 3, 7, 2, 4]
PARAMS = [SamplingParams(temperature=0, max_tokens=length, ignore_eos=True) for length in LENGTHS]


@pytest.fixture(scope="module", params=[True, False], ids=["asynchronous", "plain"])
def llm(request: pytest.FixtureRequest, tiny_checkpoint: Path) -> LLM:
    return LLM(tiny_checkpoint, asynchronous=request.param, max_num_seqs=4)


def test_each_output_comes_once_and_as_soon_as_it_is_there(llm: LLM) -> None:
    seen: list[RequestOutput] = []
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False, on_output=seen.append)
    assert sorted(seen, key=lambda output: output.index) == outputs
    order = [output.index for output in seen]
    assert order[0] == 3, "the shortest of those that run at once"
    assert order.index(1) < order.index(0)
    check_at_rest(llm)


def test_bad_requests_are_reported_first(llm: LLM) -> None:
    seen: list[RequestOutput] = []
    llm.generate(["", "good", ""], PARAMS[:3], use_tqdm=False, on_error="return", on_output=seen.append)
    assert [output.index for output in seen] == [0, 2, 1]
    assert [output.finish_reason for output in seen] == ["error", "error", "length"]


def test_chats_are_reported_parsed(llm: LLM) -> None:
    seen: list[RequestOutput] = []
    chat: Any = [{"role": "user", "content": "What?"}]
    assert llm.chat(chat, PARAMS[0], thinking=False, use_tqdm=False, on_output=seen.append) == seen
    assert seen[0].outputs[0].content is not None


def test_what_the_callback_raises_ends_the_call_and_nothing_else(llm: LLM) -> None:
    def full(output: RequestOutput) -> None:
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        llm.generate(PROMPTS, PARAMS, use_tqdm=False, on_output=full)
    check_at_rest(llm)
    assert len(llm.generate(PROMPTS[:2], PARAMS[:2], use_tqdm=False)) == 2


def test_what_is_no_function_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="on_output is 3; it takes a function"):
        llm.generate("a", PARAMS[0], on_output=3)  # type: ignore[arg-type]


KILLED = """
import os, signal, sys
from deepinfer import LLM, SamplingParams
seen = 0
def keep(output):
    global seen
    with open(sys.argv[2], "a") as file:
        file.write(f"{output.index}\\n")
    seen += 1
    if seen == 3:
        os.kill(os.getpid(), signal.SIGKILL)
params = [SamplingParams(max_tokens=count, ignore_eos=True) for count in (1, 2, 4, 90)]
LLM(sys.argv[1]).generate(["a"] * 4, params, use_tqdm=False, on_output=keep)
"""


def test_what_was_reported_outlives_a_kill(tiny_checkpoint: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-c", KILLED, str(tiny_checkpoint), str(kept)]
    assert subprocess.run(line, env=environment, check=False, timeout=120).returncode == -signal.SIGKILL
    assert [json.loads(number) for number in kept.read_text().split()] == [0, 1, 2]
