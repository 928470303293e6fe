"""Images through LLM: shared by content, cut by chunks and budgets, beside text; and what cannot be served."""

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from broken_images import broken_images
from llm_tools import Oracle, check_at_rest, parts, tokens
from PIL import Image

from deepinfer import LLM, EngineError, RequestError, SamplingParams
from deepinfer.engine import vision_stage
from deepinfer.text import loading
from deepinfer.text.images import ImageInput, preprocess
from deepinfer.text.spellings import IMAGE

SHORT = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
LOOPS = pytest.mark.parametrize("asynchronous", [True, False], ids=["asynchronous", "plain"])


def picture(seed: int = 0, width: int = 44, height: int = 30) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def chat(*images: Any, text: str = "Read it.") -> list[dict[str, Any]]:
    return [
        {
            "role": "user",
            "content": [*({"type": "image", "image": one} for one in images), {"type": "text", "text": text}],
        }
    ]


def ask(llm: LLM, *conversations: Sequence[dict[str, Any]], **options: Any) -> list[Any]:
    return llm.chat(conversations, SHORT, use_tqdm=False, **options)


@pytest.fixture(scope="module")
def oracle(tiny_checkpoint: Path) -> Oracle:
    return Oracle(tiny_checkpoint)


MIXED = [
    chat(picture(1)),
    chat(text="no picture here"),
    chat(picture(2, 20, 60), picture(3)),
    chat(picture(1), text="?"),
]


@pytest.fixture(scope="module")
def expected(tiny_checkpoint: Path, oracle: Oracle) -> list[tuple[int, ...]]:
    """Tokens of the mixed batch, each conversation by itself; they agree with the reference."""
    llm = LLM(tiny_checkpoint, prefix_cache=False)
    outputs = [ask(llm, conversation)[0] for conversation in MIXED]
    for conversation, output in zip(MIXED, outputs, strict=True):
        shown = [part["image"] for part in conversation[0]["content"] if part["type"] == "image"]
        assert oracle.agreement([output], [preprocess(image, llm.config.vision) for image in shown]) == 1
    return tokens(outputs)


@LOOPS
@pytest.mark.parametrize(
    ("chunk", "patches"), [(None, 4096), (7, 30), (4, 1), pytest.param(1, 1, marks=pytest.mark.slow)]
)
def test_mixed_batches_in_any_chunks_and_budgets(
    tiny_checkpoint: Path, expected: list[tuple[int, ...]], asynchronous: bool, chunk: int | None, patches: int
) -> None:
    llm = LLM(tiny_checkpoint, max_chunk=chunk, max_encoder_patches=patches, asynchronous=asynchronous)
    assert tokens(ask(llm, *MIXED)) == expected
    assert parts(llm).pictures.statistics.encoded == 3
    assert tokens(ask(llm, *MIXED)) == expected
    check_at_rest(llm)


def test_batch_invariant(
    tiny_checkpoint: Path, expected: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEPINFER_BATCH_INVARIANT", "1")
    packed = []
    original = vision_stage.run_blocks
    monkeypatch.setattr(
        vision_stage, "run_blocks", lambda x, grids, *rest: packed.append(grids) or original(x, grids, *rest)
    )
    llm = LLM(tiny_checkpoint)
    assert tokens(ask(llm, *MIXED)) == expected
    assert {len(grids) for grids in packed} == {1}
    assert len(packed) == 3


class TestSharing:
    def test_the_same_image_is_encoded_once(self, tiny_checkpoint: Path, tmp_path: Path) -> None:
        """In two requests of a call, in a later call, in another form, behind other text."""
        llm = LLM(tiny_checkpoint)
        picture().save(tmp_path / "x.png")
        ask(llm, chat(picture()), chat(picture(), text="Other text."))
        ask(llm, chat(tmp_path / "x.png", picture(), text="Third."))
        statistics = llm.statistics.pictures
        assert (statistics.encoded, statistics.reused) == (1, 3)
        assert statistics.patches == preprocess(picture(), llm.config.vision).grid.patches
        assert "images     1 encoded (88 patches), 3 were there already, 0 dropped" in llm.statistics.lines()

    def test_what_is_read_behind_a_hit_is_right(self, tiny_checkpoint: Path, oracle: Oracle) -> None:
        """Hits that end behind both images, and between them."""
        llm = LLM(tiny_checkpoint, page_size=4, prefix_cache=True)
        shown = [preprocess(picture(seed), llm.config.vision) for seed in (0, 1)]
        first = ask(llm, chat(picture(0), picture(1), text="Long enough to reach far back. " * 3))[0]
        assert first.cached_tokens == 0
        again = ask(llm, chat(picture(0), picture(1), text="Long enough to reach far back. " * 3))[0]
        other = ask(llm, chat(picture(0), picture(5), text="Long enough to reach far back. " * 3))[0]
        assert again.cached_tokens > other.cached_tokens > 20
        assert oracle.agreement([again], shown) == 1
        assert oracle.agreement([other], [shown[0], preprocess(picture(5), llm.config.vision)]) == 1

    def test_a_changed_pixel_is_another_image(self, tiny_checkpoint: Path) -> None:
        llm, changed = LLM(tiny_checkpoint, page_size=4), picture()
        red, green, blue = changed.getpixel((43, 29))
        changed.putpixel((43, 29), (red, green, blue ^ 128))
        first, same, other = (ask(llm, chat(image))[0] for image in (picture(), picture(), changed))
        assert llm.statistics.pictures.encoded == 2
        assert first.prompt_token_ids == other.prompt_token_ids
        assert same.cached_tokens > 20
        start = first.prompt_token_ids.index(llm.config.image_token_id)
        assert other.cached_tokens <= start
        assert other.miss == f"differs at token {start}"

    def test_an_image_behind_a_cached_prefix_is_not_encoded_again(self, tiny_checkpoint: Path) -> None:
        llm = LLM(tiny_checkpoint, page_size=4, image_cache_bytes=0)
        text = "words " * 30
        one, other = (ask(llm, chat(picture(), text=text + end))[0] for end in ("?", "!"))
        assert (one.cached_tokens, other.cached_tokens > 100) == (0, True)
        assert llm.statistics.pictures.encoded == 1

    def test_memory_keeps_to_its_budget(self, tiny_checkpoint: Path) -> None:
        llm = LLM(tiny_checkpoint, image_cache_bytes=30_000)
        ask(llm, *(chat(picture(seed), picture(seed + 3)) for seed in range(6)))
        stage = parts(llm).runner.vision
        assert 0 < sum(cells.nbytes for cells in stage._cells.values()) <= 30_000
        assert not stage._states
        statistics = llm.statistics.pictures
        assert len(stage._cells) == statistics.encoded - statistics.dropped
        assert statistics.dropped > 3


class TestFaults:
    @LOOPS
    @pytest.mark.parametrize("patches", [4096, 30])
    def test_an_encoding_that_fails_hurts_its_request_only(
        self, tiny_checkpoint: Path, expected: list[tuple[int, ...]], asynchronous: bool, patches: int,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:  # fmt: skip
        bad, original = preprocess(picture(7, 50, 22), LLM(tiny_checkpoint).config.vision), vision_stage.run_blocks

        def broken(x: torch.Tensor, grids: Sequence[Any], *rest: Any) -> torch.Tensor:
            if bad.grid in grids:
                raise torch.OutOfMemoryError("no room for scores")
            return original(x, grids, *rest)

        monkeypatch.setattr(vision_stage, "run_blocks", broken)
        llm = LLM(tiny_checkpoint, asynchronous=asynchronous, max_encoder_patches=patches)
        outputs = ask(llm, *MIXED, chat(picture(7, 50, 22)))
        assert [output.token_ids for output in outputs[:-1]] == expected
        assert isinstance(outputs[-1].error, EngineError)
        assert str(outputs[-1].error) == "image 0 cannot be encoded: OutOfMemoryError: no room for scores"
        check_at_rest(llm)
        monkeypatch.setattr(vision_stage, "run_blocks", original)
        assert ask(llm, chat(picture(7, 50, 22)))[0].error is None

    def test_a_hundred_broken_files(self, tiny_checkpoint: Path, expected: list[tuple[int, ...]]) -> None:
        """Each gives one error that names it, and the good ones among them get their answers."""
        llm, broken = LLM(tiny_checkpoint), broken_images()
        assert len(broken) == 100
        conversations = [chat(data) for data in broken.values()]
        begin = time.monotonic()
        outputs = ask(llm, *conversations[:50], *MIXED, *conversations[50:], on_error="return")
        assert time.monotonic() - begin < 60
        assert tokens(outputs[50:54]) == expected
        for name, output in zip(broken, outputs[:50] + outputs[54:], strict=True):
            assert isinstance(output.error, RequestError), name
            assert str(output.error).startswith("image 0: "), name
            assert len(str(output.error)) < 500, name
        with pytest.raises(
            RequestError, match=r"^2 of 3 conversations cannot be served, none was run: conversation 0: "
        ):
            ask(llm, conversations[0], MIXED[0], conversations[1])
        check_at_rest(llm)

    def test_too_many_images(self, tiny_checkpoint: Path) -> None:
        llm = LLM(tiny_checkpoint, max_images=2)
        assert ask(llm, chat(picture(), picture()))[0].error is None
        with pytest.raises(RequestError, match="the request has 3 images; max_images takes at most 2"):
            ask(llm, chat(*[picture()] * 3))
        with pytest.raises(RequestError, match="the request has 1 images; max_images takes at most 0"):
            ask(LLM(tiny_checkpoint, max_images=0), chat(picture()))


class TestGenerate:
    def test_text_and_ids_with_images(self, tiny_checkpoint: Path) -> None:
        llm = LLM(tiny_checkpoint, prefix_cache=False)
        marker, bos = llm.config.image_token_id, llm.config.bos_token_id
        text = f"See {IMAGE} and {IMAGE}, then"
        images = [picture(), picture(4, 20, 20)]
        by_text = llm.generate({"prompt": text, "images": images}, SHORT, use_tqdm=False)[0]
        spans = [preprocess(image, llm.config.vision).grid.tokens for image in images]
        encode = parts(llm).tokenizer.encode
        ids = [bos, *encode("See "), marker, *encode(" and "), marker, *encode(", then")]
        assert by_text.prompt == text
        assert by_text.num_prompt_tokens == len(ids) - 2 + sum(spans)
        mixed = llm.generate([{"prompt": ids, "images": images}, "plain", {"prompt": "plain"}], SHORT, use_tqdm=False)
        assert mixed[0].prompt_token_ids == by_text.prompt_token_ids
        assert mixed[0].token_ids == by_text.token_ids
        assert mixed[1].token_ids == mixed[2].token_ids

    def test_a_chat_is_the_prompt_that_it_renders_to(self, tiny_checkpoint: Path) -> None:
        llm = LLM(tiny_checkpoint, prefix_cache=False)
        answered = ask(llm, MIXED[0])[0]
        ids = list(answered.prompt_token_ids)
        start = ids.index(llm.config.image_token_id)
        short = [*ids[: start + 1], *(one for one in ids[start:] if one != llm.config.image_token_id)]
        again = llm.generate({"prompt": short, "images": [picture(1)]}, SHORT, use_tqdm=False)[0]
        assert (again.prompt_token_ids, again.token_ids) == (answered.prompt_token_ids, answered.token_ids)

    @pytest.mark.parametrize(
        ("prompt", "message"),
        [
            ({"prompt": "x", "images": [b"x"]}, "the prompt has places for 0 images, but 1 are given"),
            ({"prompt": IMAGE, "images": []}, "the prompt has places for 1 images, but 0 are given"),
            ({"prompt": IMAGE * 2, "images": [b"x"]}, "the prompt has places for 2 images, but 1 are given"),
            ({"prompt": IMAGE, "images": b"x"}, "images takes a list, not bytes"),
            ({"prompt": IMAGE, "images": [5]}, "image 0: an image must be a path, a data URL, bytes or a PIL image"),
            ({"prompt": IMAGE, "images": [None]}, "image 0: an image must be a path, .* got NoneType"),
            ({"prompt": IMAGE, "image": [b"x"]}, "a prompt has the unknown key 'image'"),
            ({"prompt": "", "images": []}, "the prompt is empty"),
            ({"images": []}, "a prompt is text, a list of token ids, or with images"),
            ({"prompt": [10_000], "images": []}, "token 0 is 10000; the vocabulary has"),
            ({"prompt": IMAGE, "images": ["absent.png"]}, r"image 0: image 'absent\.png' cannot be read"),
        ],
    )
    def test_bad_prompts(self, tiny_checkpoint: Path, prompt: Any, message: str) -> None:
        with pytest.raises(RequestError, match=message):
            LLM(tiny_checkpoint).generate(prompt, SHORT, use_tqdm=False)

    def test_the_spelling_in_plain_text_is_text(self, tiny_checkpoint: Path) -> None:
        output = LLM(tiny_checkpoint).generate(f"a {IMAGE} b", SHORT, use_tqdm=False)[0]
        assert output.prompt_token_ids.count(LLM(tiny_checkpoint).config.image_token_id) == 0


def test_images_are_read_at_the_same_time(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of different conversations, too, on other threads than the caller's; one shared PIL image does no harm."""
    meeting, threads = threading.Barrier(2, timeout=20), set()

    def meet(image: Image.Image, vision: Any) -> ImageInput:
        threads.add(threading.current_thread().name)
        meeting.wait()
        return preprocess(image, vision)

    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(loading, "preprocess", meet)
    llm, shared = LLM(tiny_checkpoint), picture()
    assert len(tokens(ask(llm, chat(shared), chat(shared, picture(3)), chat(picture(5))))) == 3
    assert len(threads) == 2
    assert all(name.startswith("deepinfer-images") for name in threads)
