"""Sampling from outside: options, seeds, several completions, stops and log-probabilities, whatever the engine does."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from llm_tools import AGREE, Oracle, caches_of, check_at_rest, parts, texts
from PIL import Image
from sampling_reference import adjusted

from deepinfer import LLM, RequestError, RequestOutput, SamplingParams
from deepinfer.core.outputs import TokenLogprobs
from deepinfer.sampling.random import derived_seed

LONG = texts(11, 1, 200, 200)[0]
PROMPTS = texts(12, 6, 1, 40)
MIXED = [
    SamplingParams(
        temperature=(0, 0.9, 1.4)[place % 3],
        top_k=(0, 30)[place % 2],
        top_p=(1, 0.9, 1, 0.7)[place % 4],
        min_p=(0, 0.02)[place % 2],
        presence_penalty=(0, 0.8)[place % 2],
        frequency_penalty=(0, 0, 0.5)[place % 3],
        repetition_penalty=(1, 1.4)[place // 2 % 2],
        logit_bias={place: 1.0, 77: -math.inf} if place % 2 else None,
        min_tokens=place % 5,
        max_tokens=12,
        logprobs=(None, 0, 2)[place % 3],
        seq_seed=place,
        ignore_eos=True,
    )
    for place in range(len(PROMPTS))
]


@pytest.fixture(scope="module")
def oracle(tiny_checkpoint: Path) -> Oracle:
    return Oracle(tiny_checkpoint)


@pytest.fixture(scope="module")
def llm(tiny_checkpoint: Path) -> LLM:
    return LLM(tiny_checkpoint)


def ask(llm: LLM, prompt: str | list[int], **fields: object) -> RequestOutput:
    params = SamplingParams(**fields)  # type: ignore[arg-type]
    return llm.generate(prompt, params, use_tqdm=False)[0]


def test_every_mix_is_the_same_to_the_bit_in_any_company(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With batch invariance: alone, in the other loop, without drafts, and begun again after losing its pages."""
    monkeypatch.setenv("DEEPINFER_BATCH_INVARIANT", "1")
    settings = {"prefix_cache": False, "page_size": 8}
    outputs = LLM(tiny_checkpoint, **settings).generate(PROMPTS, MIXED, use_tqdm=False)
    plain = LLM(tiny_checkpoint, asynchronous=False, nextn=0, **settings)
    narrow = LLM(tiny_checkpoint, cache_bytes=caches_of(tiny_checkpoint, 10, 32, 8), **settings)
    assert plain.generate(PROMPTS[::-1], MIXED[::-1], use_tqdm=False)[::-1] == reindexed(outputs, backwards=True)
    assert narrow.generate(PROMPTS, MIXED, use_tqdm=False) == outputs
    assert parts(narrow).scheduler.statistics.preemptions > 2
    alone = [plain.generate(*pair, use_tqdm=False)[0] for pair in zip(PROMPTS, MIXED, strict=True)]
    assert alone == reindexed(outputs)
    check_at_rest(narrow)


def reindexed(outputs: Sequence[RequestOutput], backwards: bool = False) -> list[RequestOutput]:
    """The same as the only output of a call each, or of a call in the other order."""
    return [replace(output, index=len(outputs) - 1 - place if backwards else 0) for place, output in enumerate(outputs)]


def test_greedy_tokens_with_penalties_are_the_references(llm: LLM, oracle: Oracle) -> None:
    """The reference recomputes each token's logits; NumPy applies the options to them."""
    params = SamplingParams(
        temperature=0, max_tokens=24, ignore_eos=True, presence_penalty=0.7, frequency_penalty=0.6,
        repetition_penalty=1.3, logit_bias={60: 1.5},
    )  # fmt: skip
    prompt = texts(13, 1, 20, 20)[0]
    made = llm.generate(prompt, params, use_tqdm=False)[0].token_ids
    free = llm.generate(prompt, SamplingParams(0, 24, ignore_eos=True), use_tqdm=False)[0].token_ids
    assert made != free
    ids = torch.tensor([[*prompt, *made[:-1]]])
    with torch.inference_mode():
        logits = oracle.model(ids).logits[0, len(prompt) - 1 :].numpy()
    right = 0
    for place, token in enumerate(made):
        row = adjusted(logits[place], params, prompt, made[:place])
        row[oracle.config.image_token_id] = -math.inf
        right += row[token] >= row.max() - 0.05
    assert right == len(made)


class TestSeeds:
    def test_a_drawn_seed_is_reported_and_repeats_the_answer(self, llm: LLM) -> None:
        first, second = (ask(llm, LONG, max_tokens=12) for _ in range(2))
        seeds = [output.outputs[0].seq_seed for output in (first, second)]
        assert seeds[0] != seeds[1]
        again = ask(llm, LONG, max_tokens=12, seq_seed=seeds[1])
        assert again.token_ids == second.token_ids
        assert again.outputs[0].seq_seed == seeds[1]

    def test_greedy_answers_have_none(self, llm: LLM) -> None:
        assert ask(llm, "a", temperature=0, max_tokens=1, seq_seed=4).outputs[0].seq_seed is None

    def test_derived_seeds_are_distinct_and_the_first_is_the_seed(self) -> None:
        seeds = [derived_seed(seed, completion) for seed in range(50) for completion in range(50)]
        assert len(set(seeds)) == 2500
        assert all(0 <= seed < 2**64 for seed in seeds)
        assert derived_seed(2**64 - 1, 0) == 2**64 - 1


class TestSeveralCompletions:
    @pytest.mark.parametrize("asynchronous", [True, False], ids=["asynchronous", "plain"])
    def test_they_share_the_pages_of_the_prompt(self, tiny_checkpoint: Path, asynchronous: bool) -> None:
        llm = LLM(tiny_checkpoint, asynchronous=asynchronous)
        output = ask(llm, LONG, n=5, max_tokens=6, seq_seed=3, ignore_eos=True)
        assert [one.index for one in output.outputs] == [0, 1, 2, 3, 4]
        assert len({one.token_ids for one in output.outputs}) == 5
        assert len({one.seq_seed for one in output.outputs}) == 5
        assert (output.cached_tokens, output.miss) == (0, "first seen")
        assert llm.statistics.cache.hit_tokens == 4 * 192
        check_at_rest(llm)

    def test_running_completions_hold_the_same_pages(self, tiny_checkpoint: Path) -> None:
        """A cache of 3 + 5 pages has room for five completions of 200 tokens only because they share three pages."""
        llm = LLM(tiny_checkpoint, cache_bytes=caches_of(tiny_checkpoint, 8))
        output = ask(llm, LONG, n=5, max_tokens=6, ignore_eos=True)
        assert [one.num_tokens for one in output.outputs] == [6] * 5
        assert parts(llm).scheduler.statistics.preemptions == 0
        assert llm.statistics.cache.hit_tokens == 4 * 192
        assert parts(llm).scheduler.statistics.largest_step < 5 * len(LONG)

    def test_a_seed_repeats_all_of_them_and_each_alone(self, llm: LLM) -> None:
        once, again = (ask(llm, LONG, n=3, max_tokens=8, seq_seed=8) for _ in range(2))
        assert [one.token_ids for one in once.outputs] == [one.token_ids for one in again.outputs]
        third = ask(llm, LONG, max_tokens=8, seq_seed=again.outputs[2].seq_seed)
        assert third.token_ids == again.outputs[2].token_ids

    @pytest.mark.parametrize("length", [1, 64, 65])
    def test_prompts_about_a_page_long(self, llm: LLM, length: int) -> None:
        output = ask(llm, LONG[:length], n=3, max_tokens=4, temperature=0, ignore_eos=True)
        assert len({one.token_ids for one in output.outputs}) == 1

    def test_without_a_prefix_cache_each_runs_the_prompt(self, tiny_checkpoint: Path) -> None:
        output = ask(LLM(tiny_checkpoint, prefix_cache=False), LONG, n=3, max_tokens=4, ignore_eos=True)
        assert [one.num_tokens for one in output.outputs] == [4] * 3

    def test_they_stand_beside_other_requests_and_come_out_once(self, llm: LLM) -> None:
        told: list[RequestOutput] = []
        params = [SamplingParams(n=n, max_tokens=5, ignore_eos=True) for n in (1, 3, 2)]
        outputs = llm.generate([LONG, LONG[5:], "a"], params, use_tqdm=False, on_output=told.append)
        assert [len(output.outputs) for output in outputs] == [1, 3, 2]
        assert sorted(output.index for output in told) == [0, 1, 2]
        check_at_rest(llm)

    def test_when_the_first_fails_the_others_go_on(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        runner, run = parts(llm).runner, parts(llm).runner.run
        monkeypatch.setattr(runner, "run", lambda plan: 1 / 0 if 0 in [s.first for s in plan.spans] else run(plan))
        output = ask(llm, texts(14, 1, 150, 150)[0], n=3, max_tokens=3, ignore_eos=True)
        assert output.error is not None
        assert "ZeroDivisionError" in str(output.error)
        check_at_rest(llm)


class TestStops:
    def test_what_precedes_a_stop_string_is_exact(self, llm: LLM) -> None:
        """Cut the answer's own text at each of its characters' pairs; asynchronous overshoot leaves no trace."""
        free = ask(llm, "The", temperature=0, max_tokens=40, ignore_eos=True).text
        for begin in range(0, len(free) - 2, 5):
            stop = free[begin : begin + 2]
            if "\ufffd" in stop:
                continue
            output = ask(llm, "The", temperature=0, max_tokens=40, ignore_eos=True, stop=["none such", stop])
            assert output.text == free[: free.index(stop)]
            assert (output.finish_reason, output.outputs[0].stop_reason) == ("stop", stop)
        check_at_rest(llm)

    def test_min_tokens_keeps_the_end_away(self, llm: LLM) -> None:
        free = ask(llm, "The", temperature=0, max_tokens=6, ignore_eos=True).token_ids
        stop = {"temperature": 0, "max_tokens": 12, "stop_token_ids": [free[2]]}
        early = ask(llm, "The", **stop)
        assert early.token_ids == free[: free.index(free[2]) + 1]
        assert early.outputs[0].stop_reason == free[2]
        late = ask(llm, "The", min_tokens=6, **stop)
        assert len(late.token_ids) >= 6
        assert free[2] not in late.token_ids[:6]

    def test_a_chat_is_cut_in_its_content(self, tiny_checkpoint: Path) -> None:
        llm = LLM(tiny_checkpoint)
        chat = [{"role": "user", "content": "hi"}]
        params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
        free = llm.chat(chat, params, thinking=False, use_tqdm=False)[0].outputs[0]
        assert free.content is not None
        places = [place for place in range(4, len(free.content) - 1) if free.content[place : place + 2].isprintable()]
        stop = free.content[places[0] : places[0] + 2]
        cut = llm.chat(chat, replace(params, stop=stop), thinking=False, use_tqdm=False)[0].outputs[0]
        assert cut.stop_reason == stop
        assert cut.content == free.content[: free.content.index(stop)]

    def test_unknown_token_ids_are_refused(self, llm: LLM) -> None:
        for fields in ({"logit_bias": {10**6: 1.0}}, {"stop_token_ids": [10**6]}):
            with pytest.raises(RequestError, match="names token 1000000; the vocabulary has 0 to"):
                ask(llm, "a", **fields)

    def test_a_request_that_may_draw_nothing_fails_alone(self, llm: LLM) -> None:
        nothing = SamplingParams(logit_bias=dict.fromkeys(range(parts(llm).tokenizer.vocab_size), -math.inf))
        params = [SamplingParams(0, 5, ignore_eos=True), nothing]
        good, bad = llm.generate(["a", "b"], params, use_tqdm=False)
        assert good.finish_reason == "length"
        assert bad.finish_reason == "error"
        assert "no token could be drawn" in str(bad.error)
        check_at_rest(llm)


class TestLogprobs:
    def expected(self, oracle: Oracle, ids: Sequence[int]) -> torch.Tensor:
        """FP64 [T, vocab] log-probabilities behind each token, the decoder half run over everything."""
        with torch.inference_mode():
            logits = oracle.model(torch.tensor([list(ids)])).logits[0].double().clone()
            logits[:, oracle.config.image_token_id] = -torch.inf
            return torch.log_softmax(logits, -1)

    def check(self, found: TokenLogprobs, wanted: torch.Tensor, token: int, top: int) -> None:
        assert found.logprob == pytest.approx(wanted[token].item(), abs=0.02)
        assert len(found.top) == top
        assert list(found.top.values()) == sorted(found.top.values(), reverse=True)
        for one, value in found.top.items():
            assert value == pytest.approx(wanted[one].item(), abs=0.02)
            assert value >= wanted.topk(top).values[-1].item() - 0.02

    def test_of_generated_tokens(self, llm: LLM, oracle: Oracle) -> None:
        prompt = LONG[:20]  # shorter than what is replayed
        output = ask(llm, prompt, temperature=0.7, top_k=5, max_tokens=9, logprobs=3, seq_seed=1, ignore_eos=True)
        wanted = self.expected(oracle, [*prompt, *output.token_ids])
        logprobs = output.outputs[0].logprobs
        assert logprobs is not None
        assert len(logprobs) == 9
        for place, found in enumerate(logprobs):
            self.check(found, wanted[len(prompt) - 1 + place], output.token_ids[place], 3)
        total = output.outputs[0].cumulative_logprob
        assert total == pytest.approx(sum(found.logprob for found in logprobs))

    def test_they_end_with_the_tokens(self, llm: LLM) -> None:
        free = ask(llm, "The", temperature=0, max_tokens=9, ignore_eos=True).token_ids
        output = ask(llm, "The", temperature=0, max_tokens=9, logprobs=0, stop_token_ids=[free[4]], ignore_eos=True)
        logprobs = output.outputs[0].logprobs
        assert logprobs is not None
        assert len(logprobs) == len(output.token_ids) < 9

    @pytest.mark.parametrize("chunk", [None, 7, 64])
    def test_of_the_prompt(self, tiny_checkpoint: Path, oracle: Oracle, chunk: int | None) -> None:
        """All of it, though a cached prefix and bounded replay would run but its end."""
        llm = LLM(tiny_checkpoint, max_chunk=chunk)
        ask(llm, LONG, max_tokens=1)
        output = ask(llm, LONG, temperature=0, max_tokens=8, prompt_logprobs=2, ignore_eos=True)
        assert (output.cached_tokens, output.miss) == (0, "mode forbids")
        wanted = self.expected(oracle, [*LONG, *output.token_ids])
        assert output.prompt_logprobs is not None
        assert len(output.prompt_logprobs) == len(LONG)
        assert output.prompt_logprobs[0] is None
        for position, found in enumerate(output.prompt_logprobs[1:], start=1):
            assert found is not None
            self.check(found, wanted[position - 1], LONG[position], 2)
        best = wanted[len(LONG) - 1 : -1].argmax(-1).tolist()
        assert sum(map(int.__eq__, best, output.token_ids)) / 8 >= AGREE - 0.2
        again = ask(llm, LONG, max_tokens=1)
        assert again.cached_tokens == 192

    def test_tokens_of_an_image_have_none(self, llm: LLM) -> None:
        image = {"type": "image", "image": Image.new("RGB", (60, 50), "red")}
        chat = [{"role": "user", "content": [image, {"type": "text", "text": "what?"}]}]
        params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1)
        (output,) = llm.chat(chat, params, use_tqdm=False)
        marker = parts(llm).config.image_token_id
        assert output.error is None
        assert output.prompt_logprobs is not None
        for place, (token, found) in enumerate(zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)):
            assert (found is None) == (place == 0 or token == marker)
            assert found is None or -math.inf < found.logprob <= 0

    def test_without_asking_there_are_none(self, llm: LLM) -> None:
        output = ask(llm, "The", max_tokens=2)
        assert output.outputs[0].logprobs is None
        assert output.outputs[0].cumulative_logprob is None
        assert output.prompt_logprobs is None

    def test_of_a_prompt_of_one_token(self, llm: LLM) -> None:
        assert ask(llm, [5], max_tokens=1, prompt_logprobs=1).prompt_logprobs == (None,)
