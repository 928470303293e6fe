"""The engine from outside: whatever the loop, chunks, company and shortage of pages, the tokens are the reference's."""

from pathlib import Path

import pytest
from llm_tools import AGREE, Oracle, alike, caches_of, check_at_rest, parts, texts, tokens
from PIL import Image

from deepinfer import LLM, SamplingParams
from deepinfer.text.images import preprocess

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = texts(1, 24, 1, 150)
MIXED = [
    SamplingParams(
        temperature=(0, 0.8, 1.5)[place % 3],
        max_tokens=1 + place % 14,
        stop_token_ids=range(0, 256, 9),  # about one token in nine ends its request, often with a step in flight
        seq_seed=place,
    )
    for place in range(len(PROMPTS))
]


@pytest.fixture(scope="module")
def oracle(tiny_checkpoint: Path) -> Oracle:
    return Oracle(tiny_checkpoint)


@pytest.fixture(scope="module")
def cold(tiny_checkpoint: Path) -> LLM:
    return LLM(tiny_checkpoint, prefix_cache=False)


def test_plain_and_asynchronous_loops_give_the_same(cold: LLM, tiny_checkpoint: Path, oracle: Oracle) -> None:
    plain = LLM(tiny_checkpoint, prefix_cache=False, asynchronous=False)
    ahead = cold.generate(PROMPTS, MIXED, use_tqdm=False)
    behind = plain.generate(PROMPTS, MIXED, use_tqdm=False)
    assert alike(ahead, behind) >= AGREE
    assert {output.finish_reason for output in ahead} == {"stop", "length"}
    assert parts(cold).scheduler.statistics.dropped_rows > 0
    assert parts(plain).scheduler.statistics.dropped_rows == 0
    assert (
        oracle.agreement([output for output, params in zip(ahead, MIXED, strict=True) if not params.temperature]) == 1
    )
    for llm in (cold, plain):
        check_at_rest(llm)


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [True, False], ids=["asynchronous", "plain"])
@pytest.mark.parametrize("chunk", [1, 7, 64, None])
def test_chunks_of_any_size(tiny_checkpoint: Path, oracle: Oracle, chunk: int | None, asynchronous: bool) -> None:
    llm = LLM(tiny_checkpoint, prefix_cache=False, max_chunk=chunk, asynchronous=asynchronous)
    outputs = llm.generate(PROMPTS[:12], GREEDY, use_tqdm=False)
    assert oracle.agreement(outputs) >= AGREE
    check_at_rest(llm)


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [True, False], ids=["asynchronous", "plain"])
def test_requests_that_lose_their_pages_get_the_same_tokens(
    cold: LLM, tiny_checkpoint: Path, oracle: Oracle, asynchronous: bool
) -> None:
    """Twelve pages of eight tokens for requests of 25 to 50 tokens."""
    llm = LLM(
        tiny_checkpoint, max_num_seqs=6, page_size=8, cache_bytes=caches_of(tiny_checkpoint, 12, 6, 8),
        asynchronous=asynchronous, max_chunk=16, prefix_cache=False,
    )  # fmt: skip
    prompts = texts(2, 10, 5, 30)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert parts(llm).scheduler.statistics.preemptions >= 2
    assert oracle.agreement(outputs) >= AGREE
    assert [len(output.token_ids) for output in outputs] == [20] * 10
    seeded = [SamplingParams(temperature=1, max_tokens=20, ignore_eos=True, seq_seed=n) for n in range(10)]
    assert alike(llm.generate(prompts, seeded, use_tqdm=False), cold.generate(prompts, seeded, use_tqdm=False)) > 0.9
    check_at_rest(llm)


def test_a_reply_ends_where_the_caches_do(tiny_checkpoint: Path) -> None:
    llm = LLM(tiny_checkpoint, max_num_seqs=1, page_size=8, cache_bytes=caches_of(tiny_checkpoint, 4, 1, 8))
    output = llm.generate([5] * 20, SamplingParams(0, None, ignore_eos=True), use_tqdm=False)[0]
    assert (output.finish_reason, output.num_prompt_tokens + len(output.token_ids)) == ("length", 4 * 8 + 1)
    check_at_rest(llm)


def test_many_short_requests_in_few_places(tiny_checkpoint: Path, oracle: Oracle) -> None:
    llm = LLM(tiny_checkpoint, max_num_seqs=4)
    prompts = texts(3, 80, 1, 20)
    params = [SamplingParams(temperature=0, max_tokens=1 + place % 5, ignore_eos=True) for place in range(80)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [list(output.prompt_token_ids) for output in outputs] == prompts
    assert [output.index for output in outputs] == list(range(80))
    assert [len(output.token_ids) for output in outputs] == [1 + place % 5 for place in range(80)]
    assert oracle.agreement(outputs[::8]) >= AGREE
    statistics = llm.statistics.scheduler
    assert statistics.finished == 80
    assert 2.5 < statistics.mean_requests <= 4  # a place is free again when the last step in flight is back
    check_at_rest(llm)


def test_prompts_longer_than_a_step(tiny_checkpoint: Path, oracle: Oracle) -> None:
    """A budget of 16 rows: prompts are cut, and decode rows come first."""
    llm = LLM(tiny_checkpoint, max_num_seqs=8, max_num_batched_tokens=16, prefix_cache=False)
    outputs = llm.generate(PROMPTS[:8], GREEDY, use_tqdm=False)
    assert llm.statistics.scheduler.largest_step == 16
    assert oracle.agreement(outputs) >= AGREE


def picture(width: int, height: int) -> Image.Image:
    return Image.linear_gradient("L").resize((width, height)).convert("RGB")


def about(*images: Image.Image) -> list[dict[str, object]]:
    shown = [{"type": "image", "image": image} for image in images]
    return [{"role": "user", "content": [*shown, {"type": "text", "text": "Read it."}]}]


@pytest.mark.parametrize("chunk", [5, None])
def test_images_agree_with_the_reference(tiny_checkpoint: Path, oracle: Oracle, chunk: int | None) -> None:
    """Two images a prompt; with chunks of five both are cut into many."""
    llm = LLM(tiny_checkpoint, max_chunk=chunk, prefix_cache=False)
    images = [picture(30, 20), picture(60, 12)]
    output = llm.chat(about(*images), GREEDY, use_tqdm=False)[0]
    assert llm.config.vision is not None
    assert oracle.agreement([output], [preprocess(image, llm.config.vision) for image in images]) >= AGREE
    check_at_rest(llm)


@pytest.mark.parametrize("chunk", [9, None])
def test_text_chats_and_images_share_their_steps(cold: LLM, tiny_checkpoint: Path, chunk: int | None) -> None:
    chats = [
        about(picture(30, 20)),
        [{"role": "user", "content": "What is 47 + 38?"}],
        about(picture(60, 12), picture(20, 20)),
        [{"role": "system", "content": "Be brief. " * 9}, {"role": "user", "content": "Hello"}],
    ] * 2
    params = [SamplingParams(temperature=place % 2, max_tokens=8, seq_seed=place) for place in range(8)]
    thinking = [False, True] * 4
    alone = [
        cold.chat(chat, one, thinking=mode, use_tqdm=False)[0]
        for chat, one, mode in zip(chats, params, thinking, strict=True)
    ]
    llm = LLM(tiny_checkpoint, max_chunk=chunk, max_num_seqs=3, prefix_cache=False)
    together = llm.chat(chats, params, thinking=thinking, use_tqdm=False)
    assert tokens(together) == tokens(alone)
    assert [output.outputs[0].content for output in together] == [output.outputs[0].content for output in alone]
    check_at_rest(llm)


def test_bfloat16_answers_too(tiny_checkpoint: Path) -> None:
    """BF16 has its own roundings; here it is one way through, and seeds still repeat."""
    llm = LLM(tiny_checkpoint, dtype="bfloat16", prefix_cache=False)
    first = llm.generate(PROMPTS, MIXED, use_tqdm=False)
    assert alike(first, llm.generate(PROMPTS, MIXED, use_tqdm=False)) == 1
    check_at_rest(llm)
