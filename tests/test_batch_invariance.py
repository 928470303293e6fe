"""Batch-invariant mode: a request's logits are the same bits alone and in any company, chunks and order."""

import random
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llm_tools import caches_of, parts, texts, tokens
from model_rig import Player, Rig, rig_of, text
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import check_invariance
from invariance_check.engine_runs import Engines, Setting, difference, random_requests, random_settings

from deepinfer import LLM, SamplingParams
from deepinfer.config.envs import read_environment
from deepinfer.ops.choice import batch_invariant

DTYPES = [torch.float32, torch.bfloat16]
VARIANTS = ["all parts", "candidates of pairs", "hidden 96", "odd widths"]
MINI = Path(__file__).parents[1] / "checkpoints" / "mini"
Logits = dict[int, Tensor]


def alone(rig: Rig, ids: list[int], start: int) -> Logits:
    player = Player(rig.model, slots=2, pages=24)
    return player.run(player.add(ids, "compact", start), len(ids)).logits


def together(rig: Rig, prompts: list[tuple[list[int], int]], choose: Callable[[int, int], int]) -> list[Logits]:
    """All in one cache, in steps that `choose(low, high)` makes up; some begin again, as after a preemption."""
    player = Player(rig.model, slots=len(prompts), pages=len(prompts) * 10)
    waiting, running, found = list(enumerate(prompts)), {}, [Logits() for _ in prompts]
    while waiting or running:
        for place, (ids, start) in [waiting.pop(0) for _ in range(min(len(waiting), choose(0 if running else 1, 2)))]:
            running[player.add(ids, "compact", start)] = place
        counts = {}
        for number in list(running):
            playing = player.requests[number]
            count = min(choose(0, 3) * choose(1, 9), len(playing.ids) - playing.done)
            if count:
                counts[number] = count
            elif not choose(0, 7):
                player.end(number)
                waiting.append((running[number], prompts[running.pop(number)]))
        if counts:
            player.step(counts)
        for number in [
            number for number in running if player.requests[number].done == len(player.requests[number].ids)
        ]:
            found[running.pop(number)] = player.end(number).logits
    return found


def differing(wanted: Logits, found: Logits) -> int:
    assert wanted.keys() == found.keys()
    return sum(not torch.equal(row, found[position]) for position, row in wanted.items())


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@given(data=st.data())
@settings(max_examples=6)
def test_any_company_leaves_every_bit(dtype: torch.dtype, data: st.DataObject) -> None:
    rig = rig_of(data.draw(st.sampled_from(VARIANTS)), dtype)
    lengths = data.draw(st.lists(st.integers(1, 60), min_size=1, max_size=4))
    prompts = []
    for seed, length in enumerate(lengths):
        shared = text(rig, length, 0)[: length // 2]
        ids = [*shared, *text(rig, length - len(shared), 1 + seed)]
        prompts.append((ids, max(0, length - data.draw(st.integers(1, 30)))))
    source = random.Random(data.draw(st.integers(0, 1 << 32)))
    with batch_invariant():
        found = together(rig, prompts, source.randint)
        for (ids, start), logits in zip(prompts, found, strict=True):
            assert differing(alone(rig, ids, start), logits) == 0


def test_without_the_mode_bits_differ() -> None:
    """Else these tests would show nothing: the same comparison, plain, where a single row takes another kernel."""
    rig = rig_of("all parts")
    ids, other = text(rig, 40), text(rig, 30, 1)
    for wanted in (False, True):
        with batch_invariant(wanted):
            lone = alone(rig, ids, 12)
            first, _ = together(rig, [(ids, 12), (other, 2)], lambda low, high: min(high, max(low, 1)))
            assert bool(differing(lone, first)) is not wanted


def test_the_mode_holds_for_its_thread_and_ends() -> None:
    rig = rig_of("all parts")
    ids = text(rig, 20)
    plain = alone(rig, ids, 0)
    with batch_invariant(), ThreadPoolExecutor(1) as elsewhere:
        assert differing(plain, alone(rig, ids, 0)) > 0
        assert differing(plain, elsewhere.submit(alone, rig, ids, 0).result()) == 0
    assert differing(plain, alone(rig, ids, 0)) == 0


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True], ids=["plain", "asynchronous"])
def test_deterministic_sampling(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool) -> None:
    """Same ids, same parameters, same output: alone, in a batch that runs out of pages, in another order, again."""
    monkeypatch.setenv("DEEPINFER_BATCH_INVARIANT", "1")
    prompts = texts(3, 3, 20, 50)
    params = [SamplingParams(temperature=1.0, seq_seed=n, max_tokens=34, ignore_eos=True) for n in range(3)]
    quiet = LLM(tiny_checkpoint, max_num_seqs=1, asynchronous=asynchronous)
    wanted = [tokens(quiet.generate(p, s, use_tqdm=False))[0] for p, s in zip(prompts, params, strict=True)]
    crowded = LLM(
        tiny_checkpoint, max_num_seqs=3, page_size=16, max_chunk=17, asynchronous=asynchronous,
        cache_bytes=caches_of(tiny_checkpoint, 8, 3, 16),
    )  # fmt: skip
    assert tokens(crowded.generate(prompts, params, use_tqdm=False)) == wanted
    assert parts(crowded).scheduler.statistics.preemptions > 0
    outputs = crowded.generate(prompts[::-1], params[::-1], use_tqdm=False)
    assert tokens(outputs) == wanted[::-1]
    assert {output.miss for output in outputs} == {"mode forbids"}
    assert {output.cached_tokens for output in outputs} == {0}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_bundled_checkpoint(dtype: str) -> None:
    engines = Engines(MINI, read_environment({"DEEPINFER_BATCH_INVARIANT": "1"}), dtype)
    requests = random_requests(engines.vocabulary, 2, 170, 3, seed=1)
    one = Setting("alone", {"max_num_seqs": 1, "page_size": 16}, (0,))
    lone, _ = engines.run(requests, one)
    (setting,) = random_settings(1, requests, 16, seed=2)
    drawn, _ = engines.run(requests, setting)
    assert {place for place in drawn if place[0] == 0} == lone.keys()
    assert max(difference(lone[place], drawn[place]) for place in lone) == 0


def test_the_script_finds_the_operator(tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "--model",
        str(tiny_checkpoint),
        "--requests",
        "4",
        "--longest",
        "60",
        "--tokens",
        "3",
        "--rounds",
        "1",
    ]
    assert check_invariance.main([*arguments, "--operators"]) == 0
    good = capsys.readouterr().out
    assert "round 0: 0 of" in good
    assert "no operator differs" in good
    assert check_invariance.main([*arguments, "--plain"]) == 1
    assert "first operator that differs: " in capsys.readouterr().out
    assert check_invariance.main(["--model", "nowhere"]) == 2
    assert "check_invariance.py: " in capsys.readouterr().err
