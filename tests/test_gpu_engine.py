"""The engine on a GPU with PyTorch's operators: golden values, and the CPU's tokens. Run with scripts/gpu_tests.sh."""

import json
from collections.abc import Sequence
from pathlib import Path

import check_golden
import pytest

from deepinfer import LLM, SamplingParams
from train.sample import Split, stream
from train.tasks import TaskMaker

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[1]
GREEDY = SamplingParams(temperature=0, max_tokens=64)
ENDLESS = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)


def test_golden_values_on_the_gpu() -> None:
    report = check_golden.check(ROOT / "tests" / "golden", with_engine=True, device="cuda")
    found = [result for result in report.results if result.case.startswith("engine ")]
    print(f"{sum(result.ok for result in found)} of {len(found)} engine cases agree")
    assert found
    assert report.ok, [result for result in found if not result.ok]


def answers(llm: LLM) -> list[tuple[int, ...]]:
    """Greedy replies to exercises, pictures among them, and continuations of text: one mixed batch after another."""
    maker = TaskMaker(Split.EVAL)
    samples = [maker.make(task, stream(Split.EVAL, task, 7, n)) for task in ("add3", "json", "image") for n in range(8)]
    chats = llm.chat(
        [sample.messages for sample in samples],
        GREEDY,
        thinking=[sample.thinking for sample in samples],
        use_tqdm=False,
    )
    text = (ROOT / "eval" / "heldout.txt").read_text(encoding="utf-8")
    cuts = [text[9_000 * place :][: 30 + 400 * place] for place in range(8)]
    return [output.token_ids for output in (*chats, *llm.generate(cuts, ENDLESS, use_tqdm=False))]


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens before the first that differs."""
    return next((place for place, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), len(one))


def test_the_gpus_tokens_are_the_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """In FP32. Sums are taken in another order, so now and then a value of a cache rounds the other way: few differ."""
    expected = answers(LLM())
    monkeypatch.setenv("DEEPINFER_ACCELERATOR", "nvidia")
    for settings in ({}, {"asynchronous": False, "max_chunk": 50}):
        found = answers(LLM(dtype="float32", **settings))
        same = sum(a == b for a, b in zip(expected, found, strict=True))
        shared = [common(a, b) / len(a) for a, b in zip(expected, found, strict=True)]
        print(json.dumps({"settings": settings, "requests": len(expected), "same": same, "shared": min(shared)}))
        assert same >= 0.9 * len(expected)


def test_bfloat16_answers_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPINFER_ACCELERATOR", "nvidia")
    output = LLM().chat([{"role": "user", "content": "What is 47 + 38?"}], GREEDY, use_tqdm=False)[0]
    assert "85" in output.text
