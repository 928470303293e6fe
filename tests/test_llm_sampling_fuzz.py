"""Any mix of valid options in one call: every request ends as its options say, and nothing is left behind."""

import random
from pathlib import Path
from typing import Any

import pytest
from llm_tools import caches_of, check_at_rest, texts

from deepinfer import LLM, RequestOutput, SamplingParams
from deepinfer.core.outputs import CompletionOutput


def drawn(source: random.Random, free: str) -> SamplingParams:
    """Parameters at random; stop strings come from `free`, what the model likes to say."""

    def sometimes(value: Any, otherwise: Any) -> Any:
        return value if source.random() < 0.3 else otherwise

    most = source.randint(1, 14)
    start = source.randrange(len(free) - 2)
    return SamplingParams(
        temperature=source.choice([0, 0.7, 1, 1.5, 1e-9, 1e9]),
        max_tokens=most,
        min_tokens=sometimes(source.randint(0, most), 0),
        stop=sometimes([free[start : start + 1], free[start : start + 2], "none such"], ()),
        stop_token_ids=sometimes([source.randrange(256) for _ in range(5)], ()),
        ignore_eos=source.random() < 0.5,
        seq_seed=sometimes(source.getrandbits(64), None),
        top_k=sometimes(source.choice([1, 5, 300, 10**6]), 0),
        top_p=sometimes(source.choice([0, 0.3, 0.99]), 1),
        min_p=sometimes(source.choice([0.01, 1]), 0),
        presence_penalty=sometimes(source.uniform(-2, 2), 0),
        frequency_penalty=sometimes(source.uniform(-2, 2), 0),
        repetition_penalty=sometimes(source.uniform(0.5, 2), 1),
        logit_bias=sometimes({source.randrange(256): source.choice([-1e9, -5, 5, 1e9]) for _ in range(3)}, None),
        logprobs=sometimes(source.choice([0, 3, 1024]), None),
        prompt_logprobs=sometimes(source.choice([0, 2]), None),
        n=sometimes(source.randint(2, 3), 1),
    )


def check(one: CompletionOutput, params: SamplingParams) -> None:
    made = one.token_ids
    assert 1 <= len(made) <= (params.max_tokens or 0)
    if one.finish_reason == "length":
        assert len(made) == params.max_tokens
        assert one.stop_reason is None
    elif isinstance(one.stop_reason, str):
        assert one.stop_reason in params.stop
        assert len(made) >= params.min_tokens
    else:
        assert one.finish_reason == "stop"
        assert len(made) > params.min_tokens
        assert one.stop_reason in (*params.stop_token_ids, None)
        assert one.stop_reason is not None or not params.ignore_eos
    early = made[: params.min_tokens - 1] if params.min_tokens else ()
    assert not set(early) & set(params.stop_token_ids)
    assert (one.logprobs is None) == (params.logprobs is None)
    if one.logprobs is not None:
        assert len(one.logprobs) == len(made)
        assert all(found.logprob <= 0 for found in one.logprobs)
    assert (one.seq_seed is None) == (not params.temperature)
    if params.seq_seed is not None and params.temperature and one.index == 0:
        assert one.seq_seed == params.seq_seed


def check_prompt(output: RequestOutput, params: SamplingParams) -> None:
    assert (output.prompt_logprobs is None) == (params.prompt_logprobs is None)
    if output.prompt_logprobs is not None:
        first, *others = output.prompt_logprobs
        assert first is None
        assert all(found is not None and len(found.top) == params.prompt_logprobs for found in others)
        assert len(others) == output.num_prompt_tokens - 1


@pytest.mark.parametrize(("asynchronous", "drafts"), [(True, 5), (False, 0)], ids=["asynchronous, drafts", "plain"])
def test_every_request_ends_as_its_options_say(tiny_checkpoint: Path, asynchronous: bool, drafts: int) -> None:
    source = random.Random(drafts * 2 + asynchronous)
    pages = {"page_size": 8, "cache_bytes": caches_of(tiny_checkpoint, 60, 32, 8)}
    llm = LLM(tiny_checkpoint, asynchronous=asynchronous, nextn=drafts, **pages)
    free = llm.generate("The", SamplingParams(0, 40, ignore_eos=True), use_tqdm=False)[0].text
    prompts = texts(drafts, 30, 1, 40)
    params = [drawn(source, free) for _ in prompts]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    for output, asked in zip(outputs, params, strict=True):
        assert output.error is None
        assert [one.index for one in output.outputs] == list(range(asked.n))
        check_prompt(output, asked)
        for one in output.outputs:
            check(one, asked)
    check_at_rest(llm)
