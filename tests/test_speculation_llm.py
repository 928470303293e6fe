"""Speculation through a whole LLM: the law of the first tokens, and every kind of end within accepted drafts."""

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from grammar_tools import MINI
from llm_tools import check_at_rest, parts, texts
from test_speculation import force, sequences
from torch import Tensor

from deepinfer import LLM, RequestOutput, SamplingParams
from deepinfer.core.plan import Span
from deepinfer.sampling.grammar.grammars import Grammars
from deepinfer.sampling.grammar.matcher import Matcher
from deepinfer.speculative.speculator import Speculator
from deepinfer.text.spellings import END_THINK

PROMPT = texts(21, 1, 9, 9)[0]
LETTERS = "abcdef"
LAWS: dict[str, dict[str, Any]] = {
    "plain": {},
    "top_k": {"top_k": 4},
    "top_p": {"top_p": 0.7, "temperature": 1.5},
    "penalties": {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.5},
    "grammar": {"so_args": {"regex": "[b-f][a-e]+"}},
}
"""Besides a bias to a few letters, which the drafter has, too: so drafts are accepted, and draws say something."""


def first_two(llm: LLM, params: dict[str, Any], seeds: range) -> list[tuple[int, ...]]:
    """Behind the prompt's own first token, so that the tokens that are looked at are drafted and judged."""
    tokenizer = parts(llm).tokenizer
    bias = dict.fromkeys((tokenizer.encode(letter)[0] for letter in LETTERS), 50.0)
    fields: dict[str, Any] = {"max_tokens": 3, "ignore_eos": "so_args" not in params, "logit_bias": bias, **params}
    made = [SamplingParams(**fields, seq_seed=seed) for seed in seeds]
    return [output.token_ids[1:3] for output in llm.generate([PROMPT] * len(made), made, use_tqdm=False)]


def chi_square(found: Counter[Any], other: Counter[Any]) -> tuple[float, float]:
    """Of two samples of the same size, and the limit that it exceeds once in 10,000 times if their laws are equal."""
    cells = Counter[Any]()
    others = Counter[Any]()
    for cell in {*found, *other}:
        cells[cell if found[cell] + other[cell] >= 10 else None] += found[cell]
        others[cell if found[cell] + other[cell] >= 10 else None] += other[cell]
    kept = [cell for cell in {*cells, *others} if cells[cell] + others[cell] >= 10]
    chi = sum((cells[cell] - others[cell]) ** 2 / (cells[cell] + others[cell]) for cell in kept)
    freedom = max(len(kept) - 1, 1)
    return chi, freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3


def compare(checkpoint: Path, kind: str, varlen: bool, count: int) -> None:
    """Two samples with seeds of their own, so that equal seeds cannot make them equal."""
    plain = first_two(LLM(checkpoint, nextn=0, max_num_seqs=128), LAWS[kind], range(count))
    llm = LLM(checkpoint, draft_rule="rejection", varlen=varlen, max_num_seqs=128)
    drafted = first_two(llm, LAWS[kind], range(100_000, 100_000 + count))
    if not varlen:
        assert 1.2 < llm.statistics.speculation.accepted_length < 2.8, "some drafts are accepted"
    for part in (0, 1):
        chi, limit = chi_square(
            Counter(pair[part] for pair in plain if len(pair) > part),
            Counter(pair[part] for pair in drafted if len(pair) > part),
        )
        assert chi < limit, f"token {part}"
    chi, limit = chi_square(Counter(plain), Counter(drafted))
    assert chi < limit, "both"


@pytest.mark.parametrize(("kind", "varlen"), [("top_k", False), ("grammar", True)])
def test_the_law_of_the_first_tokens_is_that_of_plain_decoding(tiny_checkpoint: Path, kind: str, varlen: bool) -> None:
    compare(tiny_checkpoint, kind, varlen, 300)


@pytest.mark.slow
@pytest.mark.parametrize("varlen", [False, True], ids=["static", "variable"])
@pytest.mark.parametrize("kind", LAWS)
def test_the_law_of_the_first_tokens_in_large_samples(tiny_checkpoint: Path, kind: str, varlen: bool) -> None:
    compare(tiny_checkpoint, kind, varlen, 3000)


def test_other_laws_are_told_apart(tiny_checkpoint: Path) -> None:
    """As many draws show a temperature that is a little off; else the tests above would show nothing."""
    llm = LLM(tiny_checkpoint, nextn=0, max_num_seqs=128)
    one, other = (
        Counter(first_two(llm, {"temperature": heat}, range(place * 1000, place * 1000 + 300)))
        for place, heat in enumerate((1.0, 0.3))
    )
    chi, limit = chi_square(Counter(pair[0] for pair in one.elements()), Counter(pair[0] for pair in other.elements()))
    assert chi > limit


@pytest.fixture(scope="module")
def plain(tiny_checkpoint: Path) -> LLM:
    return LLM(tiny_checkpoint, nextn=0, prefix_cache=False)


VARIABLE = pytest.param({"varlen": True}, marks=pytest.mark.slow)
SETTINGS = pytest.mark.parametrize("settings", [{}, {"asynchronous": False}, VARIABLE], ids=str)


def asked(llm: LLM, **fields: Any) -> RequestOutput:
    params = SamplingParams(**{"temperature": 0, "max_tokens": 20, "ignore_eos": True, **fields})
    return llm.generate([PROMPT], params, use_tqdm=False)[0]


@SETTINGS
def test_a_stop_string_inside_accepted_drafts_ends_the_text_before_it(
    plain: LLM, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    """Whatever follows it in the block leaves no trace; strings that reach over borders of blocks, too."""
    free = asked(plain, logit_bias=dict.fromkeys(range(60, 90), 9.0))
    force(monkeypatch, sequences([free]), 0)
    llm = LLM(tiny_checkpoint, prefix_cache=False, **settings)
    for begin in (1, 3, 4, 9, 13):
        stop = free.text[begin : begin + 3]
        options: dict[str, Any] = {"logit_bias": dict.fromkeys(range(60, 90), 9.0), "stop": [stop]}
        alone, output = asked(plain, **options), asked(llm, **options)
        assert output.text == alone.text == free.text[: free.text.index(stop)]
        assert (output.token_ids, output.finish_reason) == (alone.token_ids, "stop")
        assert output.outputs[0].stop_reason == stop
    if not settings:
        assert llm.statistics.speculation.accepted_length > 3
    check_at_rest(llm)


@SETTINGS
def test_fewest_and_most_tokens_hold_inside_accepted_drafts(
    plain: LLM, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    """Every place of a block: a limit, and a stop token that counts from some token on."""
    free = asked(plain)
    stop = free.token_ids[2]
    late = asked(plain, stop_token_ids=[stop], min_tokens=7)
    for known, options in ((free, {}), (late, {"stop_token_ids": [stop], "min_tokens": 7})):
        with monkeypatch.context() as patch:
            force(patch, sequences([known]), 0)
            llm = LLM(tiny_checkpoint, prefix_cache=False, **settings)
            for most in range(7, 14):
                output = asked(llm, max_tokens=most, **options)
                assert output.token_ids == known.token_ids[:most]
                assert output.finish_reason == ("length" if len(known.token_ids) >= most + (most < 20) else "stop")
            check_at_rest(llm)


@SETTINGS
def test_the_thinking_ends_and_the_form_begins_inside_a_block(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    plain = LLM(tiny_checkpoint, nextn=0, prefix_cache=False)
    end = parts(plain).tokenizer.token_id(END_THINK)
    assert end is not None
    chat = [{"role": "user", "content": "hi"}]
    schema = {"type": "object", "properties": {"a": {"enum": ["xy", "z"]}}, "required": ["a"]}
    params = [
        SamplingParams(temperature=1.0, seq_seed=seed, max_tokens=60, logit_bias={end: 5.0}, so_args=form)
        for seed, form in enumerate([{"json_schema": schema}, {"regex": "(ab|cd){2}[0-9]{3}"}, {"json_schema": schema}])
    ]
    expected = plain.chat([chat] * 3, params, thinking=True, use_tqdm=False)
    places = [output.token_ids.index(end) for output in expected]
    assert any(place % 6 for place in places)
    force(monkeypatch, sequences(expected), 0)
    original, seen = Speculator._draft, set[int]()

    def watched(self: Speculator, spans: Sequence[Span], newest: Tensor, positions: Sequence[int]) -> Tensor:
        chances = original(self, spans, newest, positions)
        for span in spans:
            row = self.blocks.tokens[span.slot].tolist()
            seen.update({row.index(end)} if end in row else set())
        return chances

    monkeypatch.setattr(Speculator, "_draft", watched)
    llm = LLM(tiny_checkpoint, prefix_cache=False, **settings)
    outputs = [llm.chat(chat, one, thinking=True, use_tqdm=False)[0] for one in params]
    assert [one.token_ids for one in outputs] == [one.token_ids for one in expected]
    assert seen & {0, 1, 2, 3}, "the end came inside a block, with drafts of the answer behind it"
    for one, output in zip(params, outputs, strict=True):
        content = output.outputs[0].content or ""
        assert output.finish_reason == "stop"
        if "regex" in (one.so_args or {}):
            assert re.fullmatch("(ab|cd){2}[0-9]{3}", content)
        else:
            assert json.loads(content)["a"] in ("xy", "z")
    check_at_rest(llm)


@pytest.mark.parametrize("settings", [{"nextn": 0}, VARIABLE], ids=str)
def test_checked_forms_are_the_same_with_and_without_drafts(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    """The questions of examples/_structured_output.py with seeds, batch invariance on, on the bundled checkpoint."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "examples")
    from _structured_output import FORMS, check

    monkeypatch.setenv("DEEPINFER_BATCH_INVARIANT", "1")
    conversations = [[{"role": "user", "content": form.question}] for form in FORMS]
    params = [
        SamplingParams(temperature=0.6, seq_seed=seed, max_tokens=60, so_args=form.so_args)
        for seed, form in enumerate(FORMS)
    ]

    def answers(**options: Any) -> list[RequestOutput]:
        llm = LLM(MINI, max_num_seqs=4, **options)
        return llm.chat(conversations, params, thinking=False, use_tqdm=False)

    if "drafted" not in SHARED:
        SHARED["drafted"] = answers()
    drafted, other = SHARED["drafted"], answers(**settings)
    assert [one.token_ids for one in drafted] == [one.token_ids for one in other]
    for form, output in zip(FORMS, drafted, strict=True):
        assert check(form, output, 1) is None


def test_masks_filled_by_several_threads_are_the_same(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they are on a GPU's host; one request's matcher fails, which is its own trouble there, too."""
    forms = [{"regex": f"[a-{last}]{{3,9}}x"} for last in "bcdefg"]
    params = [SamplingParams(seq_seed=seed, max_tokens=12, so_args=form) for seed, form in enumerate(forms)]
    expected = LLM(tiny_checkpoint).generate([PROMPT] * 6, params, use_tqdm=False)
    llm = LLM(tiny_checkpoint)
    runner = parts(llm).runner
    runner.grammars = Grammars(runner.grammars._words, torch.device("cpu"), helpers=3)
    made = llm.generate([PROMPT] * 6, params, use_tqdm=False)
    assert [one.token_ids for one in made] == [one.token_ids for one in expected]
    take, broken = Matcher.take, SamplingParams(max_tokens=12, seq_seed=3, so_args={"regex": "[h-k]{5}"})

    def failing(self: Matcher, token: int) -> None:
        if self.length == 2 and chr(token + 33) in "hijk":
            raise RuntimeError("a fault in the matcher")
        take(self, token)

    monkeypatch.setattr(Matcher, "take", failing)
    *good, bad = llm.generate([PROMPT] * 7, [*params, broken], use_tqdm=False)
    assert [one.token_ids for one in good] == [one.token_ids for one in expected]
    assert "could not be followed" in str(bad.error)
    check_at_rest(llm)


SHARED: dict[str, list[RequestOutput]] = {}
