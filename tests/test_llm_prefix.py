"""The prefix cache from outside: what hits, what does not and why, and that a hit's tokens are the right ones."""

from pathlib import Path
from typing import Any

import pytest
from llm_tools import AGREE, Oracle, alike, caches_of, check_at_rest, parts, texts
from PIL import Image

from deepinfer import LLM, RequestOutput, SamplingParams
from deepinfer.text.images import preprocess

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
LONG, OTHER = texts(5, 2, 300, 300)


@pytest.fixture(scope="module")
def oracle(tiny_checkpoint: Path) -> Oracle:
    return Oracle(tiny_checkpoint)


@pytest.fixture
def llm(tiny_checkpoint: Path) -> LLM:
    return LLM(tiny_checkpoint)


def ask(llm: LLM, prompt: list[int], params: SamplingParams = GREEDY) -> RequestOutput:
    return llm.generate(prompt, params, use_tqdm=False)[0]


def found(output: RequestOutput) -> tuple[int, str | None]:
    return output.cached_tokens, output.miss


@pytest.mark.parametrize("asynchronous", [True, False], ids=["asynchronous", "plain"])
@pytest.mark.parametrize("chunk", [7, None])
def test_the_same_prompt_again_hits(
    tiny_checkpoint: Path, oracle: Oracle, chunk: int | None, asynchronous: bool
) -> None:
    """All whole pages but the last token's; the tokens are those of the reference with a window cut at the hit."""
    llm = LLM(tiny_checkpoint, max_chunk=chunk, asynchronous=asynchronous)
    cold, warm = ask(llm, LONG), ask(llm, LONG)
    assert (found(cold), found(warm)) == ((0, "first seen"), (256, None))
    assert oracle.agreement([cold]) >= AGREE
    assert oracle.agreement([warm]) >= AGREE
    assert llm.statistics.cache.hit_tokens == 256
    check_at_rest(llm)


@pytest.mark.parametrize("length", [65, 66, 80, 93, 127, 128, 129, 156, 157, 200])
def test_hits_before_and_behind_the_replay_start(llm: LLM, oracle: Oracle, length: int) -> None:
    """Of the last 28 prompt tokens, which the decoder half replays, none, some or all lie behind the hit."""
    cold = ask(llm, LONG, ONE)
    warm = ask(llm, LONG[:length])
    assert cold.cached_tokens == 0
    assert warm.cached_tokens == (length - 1) // 64 * 64
    assert oracle.agreement([warm]) >= AGREE


def test_without_windows_to_cut_a_hit_changes_nothing(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mode off runs all rows again, and only the writing is left out: bit for bit a cold run."""
    monkeypatch.setenv("DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE", "off")
    llm = LLM(tiny_checkpoint)
    cold, warm = ask(llm, LONG), ask(llm, LONG)
    assert warm.cached_tokens == 256
    assert warm.token_ids == cold.token_ids


def test_a_reply_is_a_prefix_too(llm: LLM, oracle: Oracle) -> None:
    """Generated tokens fill pages like those of a prompt."""
    first = ask(llm, LONG[:100], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    second = ask(llm, [*first.prompt_token_ids, *first.token_ids, 7, 8, 9])
    assert found(second) == (128, None)
    assert oracle.agreement([second]) >= AGREE


def test_a_miss_says_why(llm: LLM) -> None:
    changed = [*LONG[:150], (LONG[150] + 1) % 256, *LONG[151:]]
    assert found(ask(llm, LONG, ONE)) == (0, "first seen")
    assert found(ask(llm, LONG[:64], ONE)) == (0, "too short")
    assert found(ask(llm, changed, ONE)) == (128, "differs at token 150")
    assert found(ask(llm, OTHER, ONE)) == (0, "first seen")
    assert found(ask(llm, [*LONG, *OTHER], ONE)) == (256, "first seen")
    assert found(ask(llm, [*LONG[:5], *OTHER], ONE)) == (0, "differs at token 5")
    misses = llm.statistics.cache.misses
    assert misses == {"first seen": 3, "too short": 1, "differs": 2}


def test_evicted_pages_say_so(tiny_checkpoint: Path) -> None:
    llm = LLM(tiny_checkpoint, max_num_seqs=1, cache_bytes=caches_of(tiny_checkpoint, 5, 1))
    ask(llm, LONG, ONE)
    ask(llm, OTHER, ONE)
    assert found(ask(llm, LONG, ONE)) == (0, "evicted")
    assert llm.statistics.cache.evicted_pages > 0
    check_at_rest(llm)


def test_a_cache_that_is_switched_off_never_hits(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, settings in (("0", {"prefix_cache": False}), ("1", {})):
        monkeypatch.setenv("DEEPINFER_BATCH_INVARIANT", variable)
        llm = LLM(tiny_checkpoint, **settings)
        assert alike([ask(llm, LONG)], [ask(llm, LONG)]) == 1
        assert found(ask(llm, LONG, ONE)) == (0, "mode forbids")


def test_requests_of_one_call_share_what_the_first_has_written(tiny_checkpoint: Path, oracle: Oracle) -> None:
    """One place: each is admitted when the one before it has ended."""
    llm = LLM(tiny_checkpoint, max_num_seqs=1)
    outputs = llm.generate([[*LONG, place] for place in range(5)], GREEDY, use_tqdm=False)
    assert [output.cached_tokens for output in outputs] == [0, 256, 256, 256, 256]
    assert oracle.agreement(outputs) >= AGREE
    check_at_rest(llm)


def test_running_requests_share_pages(tiny_checkpoint: Path, oracle: Oracle) -> None:
    """Together they need far more pages than there are: 4 x 6, of 10."""
    llm = LLM(tiny_checkpoint, max_num_seqs=4, cache_bytes=caches_of(tiny_checkpoint, 10, 4))
    ask(llm, LONG, ONE)
    before = parts(llm).scheduler.statistics.steps
    outputs = llm.generate([[*LONG, place] for place in range(4)], GREEDY, use_tqdm=False)
    assert parts(llm).scheduler.statistics.steps - before < 2 * GREEDY.max_tokens  # type: ignore[operator]
    assert parts(llm).scheduler.statistics.preemptions == 0
    assert [output.cached_tokens for output in outputs] == [256] * 4
    assert oracle.agreement(outputs) >= AGREE
    check_at_rest(llm)


def test_hits_and_cold_prompts_and_decode_rows_share_steps(tiny_checkpoint: Path, oracle: Oracle) -> None:
    """Prompts with all kinds of shared beginnings, in chunks, under a shortage of pages."""
    llm = LLM(
        tiny_checkpoint, max_num_seqs=5, max_chunk=23, page_size=16, cache_bytes=caches_of(tiny_checkpoint, 60, 5, 16)
    )
    ask(llm, LONG, ONE)
    prompts = [[*LONG[: 40 * place], *tail] for place, tail in enumerate(texts(6, 8, 3, 60))]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    hits = [output.cached_tokens for output in outputs]
    assert hits[0] == 0
    assert all(40 * place - 16 < hit <= 40 * place for place, hit in enumerate(hits))
    assert oracle.agreement(outputs) >= AGREE
    check_at_rest(llm)


def picture(spot: tuple[int, int, int] = (0, 0, 0)) -> Image.Image:
    """128 image tokens or so, black but for one corner."""
    image = Image.new("RGB", (60, 52))
    image.putpixel((59, 51), spot)
    return image


def about(image: Image.Image, question: str = "What is this? " * 12) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": question}]}]


def test_the_same_image_hits_and_one_with_another_pixel_does_not(tiny_checkpoint: Path) -> None:
    """Their prompts have the same token ids."""
    llm = LLM(tiny_checkpoint, page_size=16)
    first, same, other = (
        llm.chat(about(image), ONE, use_tqdm=False)[0] for image in (picture(), picture(), picture((0, 0, 255)))
    )
    assert first.prompt_token_ids == same.prompt_token_ids == other.prompt_token_ids
    marker = llm.config.image_token_id
    begins = first.prompt_token_ids.index(marker or -1)
    assert same.cached_tokens == (same.num_prompt_tokens - 1) // 16 * 16
    assert other.cached_tokens == begins // 16 * 16
    assert other.miss == f"differs at token {begins}"


@pytest.mark.parametrize("chunk", [3, None])
def test_an_image_that_a_hit_cuts_in_two(tiny_checkpoint: Path, oracle: Oracle, chunk: int | None) -> None:
    """The next request's first rows lie within the picture, which is embedded again for them."""
    llm = LLM(tiny_checkpoint, page_size=16, max_chunk=chunk)
    llm.chat(about(picture()), ONE, use_tqdm=False)
    warm = llm.chat(about(picture(), "No."), GREEDY, use_tqdm=False)[0]
    span = [place for place, token in enumerate(warm.prompt_token_ids) if token == llm.config.image_token_id]
    start = warm.num_prompt_tokens - oracle.window - 12
    assert span[0] < min(warm.cached_tokens, start) - oracle.window < span[-1]
    assert llm.config.vision is not None
    assert oracle.agreement([warm], [preprocess(picture(), llm.config.vision)]) >= AGREE
    check_at_rest(llm)


def test_a_conversation_goes_on_where_it_was(llm: LLM) -> None:
    chat = [{"role": "user", "content": "Tell me about the sea. " * 8}]
    first = llm.chat(chat, GREEDY, thinking=False, use_tqdm=False)[0]
    chat += [{"role": "assistant", "content": first.outputs[0].content}, {"role": "user", "content": "And the land?"}]
    second = llm.chat(chat, GREEDY, thinking=False, use_tqdm=False)[0]
    assert second.cached_tokens == first.num_prompt_tokens // 64 * 64
