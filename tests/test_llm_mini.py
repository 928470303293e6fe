"""The engine on the bundled, trained checkpoint: a few answers, and that a warm prefix gives what a cold one does."""

from pathlib import Path
from typing import Any

import pytest
from llm_tools import alike, check_at_rest, parts

from deepinfer import LLM, RequestOutput, SamplingParams

ROOT = Path(__file__).parents[1]
GREEDY = SamplingParams(temperature=0, max_tokens=64)
IMAGE = {"type": "image", "image": ROOT / "examples" / "number.png"}


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


CHATS = {
    "85": user("What is 47 + 38?"),
    "36": user("What is 83 - 47?"),
    "533": user("Find the sum of 346 and 187."),
    "1647": user([IMAGE, {"type": "text", "text": "What number is in the image?"}]),
}


@pytest.fixture(scope="module")
def plain() -> LLM:
    return LLM(ROOT / "checkpoints" / "mini", asynchronous=False, max_chunk=50, prefix_cache=False)


@pytest.fixture(scope="module")
def ahead() -> LLM:
    return LLM(ROOT / "checkpoints" / "mini")


def answers(llm: LLM) -> list[RequestOutput]:
    thinking = [content != "1647" for content in CHATS]
    return llm.chat(list(CHATS.values()), GREEDY, thinking=thinking, use_tqdm=False)


def test_both_loops_answer_and_answer_alike(plain: LLM, ahead: LLM) -> None:
    """Right as a rule: the checkpoint's own tests say how often."""
    found = answers(ahead)
    assert alike(found, answers(plain)) == 1
    right = [number in (output.outputs[0].content or "") for number, output in zip(CHATS, found, strict=True)]
    assert sum(right) >= 3
    for llm in (plain, ahead):
        check_at_rest(llm)


def test_a_warm_prefix_gives_what_a_cold_one_does(plain: LLM, ahead: LLM) -> None:
    """Windows that begin at the hit change values by a little, and what a trained model says hardly ever."""
    text = (ROOT / "eval" / "heldout.txt").read_text(encoding="utf-8")
    prompts = [parts(ahead).tokenizer.encode(text[4000 * place :][: 900 + 100 * place]) for place in range(2)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    cold = plain.generate(prompts, params, use_tqdm=False)
    first, second = (ahead.generate(prompts, params, use_tqdm=False) for _ in range(2))
    assert alike(cold, first) == 1
    assert [output.cached_tokens for output in second] == [(len(prompt) - 1) // 64 * 64 for prompt in prompts]
    pairs = [(one.token_ids, other.token_ids) for one, other in zip(cold, second, strict=True)]
    assert sum(a == b for pair in pairs for a, b in zip(*pair, strict=True)) > 0.7 * 2 * 12
    (cache,) = (line for line in ahead.statistics.lines() if line.startswith("cache"))
    assert f"{sum(output.cached_tokens for output in second)} of " in cache
    check_at_rest(ahead)
