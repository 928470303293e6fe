"""Training batches: sequences as the server would see them, weights, images and fixed shapes."""

from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from deepinfer.config.model import VisionConfig
from deepinfer.text.chat import ChatFormat
from deepinfer.text.images import IMAGE, TEXT, expand_images, plan_grid, preprocess
from deepinfer.text.spellings import ASSISTANT, BOS, END_THINK, EOS, PAD
from deepinfer.text.tokenizer import Tokenizer
from train.batch import BatchBuilder
from train.packing import Mixture, PackSettings, batches
from train.rendering import Rendered, Renderer
from train.sample import Sample, Split, stream, user
from train.tasks import TaskMaker
from train.tokenised import Corpus, tokenise

ROOT = Path(__file__).parents[1]
TOKENIZER = Tokenizer.from_file(ROOT / "checkpoints" / "mini")
DOCUMENTS = (ROOT / "eval" / "heldout.txt").read_text("utf-8").split("\n\f\n")
VISION = VisionConfig(
    num_hidden_layers=1,
    hidden_size=32,
    num_attention_heads=2,
    intermediate_size=32,
    patch_size=8,
    downsample_ratio=2,
    max_image_tokens=64,
    min_pixels=1024,
)
BOS_ID, EOS_ID, PAD_ID = (TOKENIZER.token_id(spelling) for spelling in (BOS, EOS, PAD))


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "corpus.bin"
    tokenise(DOCUMENTS, TOKENIZER).tofile(path)
    return PackSettings(path, ROOT / "checkpoints" / "mini", VISION, tokens=512, rows=16, images=12)


@pytest.fixture(scope="module")
def some_batches(settings):
    return list(islice(batches(settings, seed=1), 4))


@pytest.mark.parametrize("task", ["add2", "json", "image", "general"])
def test_prompt_is_the_servers_and_the_reply_parses_back(task):
    rng = stream(Split.TRAIN, 1, task)
    chat = ChatFormat(TOKENIZER)
    for _ in range(30):
        sample = TaskMaker(Split.TRAIN).make(task, rng)
        rendered = Renderer(TOKENIZER, VISION).render(sample)
        prompt = chat.encode(sample.messages, thinking=sample.thinking)
        grids = [preprocess(image, VISION).grid for image in prompt.images]
        ids, _ = expand_images(prompt.ids, grids, TOKENIZER.token_id("<｜deepseek_image｜>"))
        assert list(rendered.ids[: len(ids)]) == ids
        assert rendered.ids[-1] == EOS_ID
        reply = chat.parse([int(i) for i in rendered.ids[len(ids) : -1]], prompt.reply)
        assert reply.content == sample.answer
        assert (reply.reasoning or "") == sample.reasoning
        assert (rendered.target_weight[len(ids) :] == 1).all()


def test_weights_of_turns():
    messages = [user("Hello"), {"role": "assistant", "content": "Hi there."}, user("Again")]
    rendered = Renderer(TOKENIZER, None, prompt_weight=0.25).render(Sample("general", messages, False, "Yes.", "Yes."))
    supervised = [int(i) for i in rendered.ids[rendered.target_weight == 1]]
    assert supervised == [*TOKENIZER.encode("Hi there."), EOS_ID, *TOKENIZER.encode("Yes."), EOS_ID]
    assert rendered.target_weight[0] == 0
    assert set(np.unique(rendered.target_weight)) == {0.0, 0.25, 1.0}
    assert (rendered.types == TEXT).all()


def test_earlier_turns_are_supervised_with_thinking_on_too():
    messages = [user("Hello"), {"role": "assistant", "content": "Hi there."}, user("Again")]
    rendered = Renderer(TOKENIZER, None).render(Sample("general", messages, True, "Yes.", "Yes.", "Sure"))
    supervised = [int(i) for i in rendered.ids[rendered.target_weight == 1]]
    reply = [*TOKENIZER.encode("Sure"), TOKENIZER.token_id(END_THINK), *TOKENIZER.encode("Yes."), EOS_ID]
    assert supervised == [*TOKENIZER.encode("Hi there."), EOS_ID, *reply]


def test_image_without_vision_is_an_error():
    sample = TaskMaker(Split.TRAIN).make("image", stream(Split.TRAIN, 1))
    with pytest.raises(ValueError, match="vision tower"):
        Renderer(TOKENIZER, None).render(sample)


def test_shapes_and_types_are_fixed(some_batches):
    expected = {
        "ids": ((16, 512), np.int32),
        "types": ((16, 512), np.int8),
        "loss_weight": ((16, 512), np.float32),
        "document": ((16, 512), np.int32),
        "patches": ((12, 120, 3, 8, 8), np.float32),
        "grid": ((12, 2), np.int32),
        "image_row": ((12,), np.int32),
        "image_positions": ((12, 30), np.int32),
    }
    for batch in some_batches:
        assert {name: (array.shape, array.dtype) for name, array in batch.items()} == expected


def test_padding_and_borders_carry_no_weight(some_batches):
    for batch in some_batches:
        ids, weight, document = batch["ids"], batch["loss_weight"], batch["document"]
        assert ((ids == PAD_ID) == (document < 0)).all()
        assert (document < 0).mean() < 0.06
        assert (weight[:, -1] == 0).all()
        target = ids[:, 1:]
        assert (weight[:, :-1][(target == BOS_ID) | (target == PAD_ID)] == 0).all()
        assert (weight[document < 0] == 0).all()
        assert 0.3 < (weight == 1).mean() < 0.95


def test_documents_begin_with_bos_and_rows_are_not_cut_samples(some_batches):
    assistant = TOKENIZER.token_id(ASSISTANT)
    for batch in some_batches:
        for ids, document in zip(batch["ids"], batch["document"], strict=True):
            assert ids[0] == BOS_ID
            assert list(document[document >= 0]) == sorted(document[document >= 0])
            for number in range(document.max() + 1):
                own = ids[document == number]
                assert own[0] == BOS_ID
                assert (own == BOS_ID).sum() == 1
                if assistant in own:
                    assert own[-1] == EOS_ID


def test_samples_begin_at_even_positions(some_batches):
    user_id = TOKENIZER.token_id("<｜User｜>")
    starts = [
        int(np.flatnonzero(batch["document"][row] == number)[0])
        for batch in some_batches
        for row in range(16)
        for number in range(batch["document"][row].max() + 1)
        if user_id in batch["ids"][row][batch["document"][row] == number]
    ]
    assert len(starts) > 50
    assert all(start % 2 == 0 for start in starts)


def test_images_point_at_their_tokens(some_batches):
    used = 0
    for batch in some_batches:
        filled = batch["image_row"] >= 0
        used += filled.sum()
        claimed = np.zeros(batch["ids"].shape, bool)
        for row, positions in zip(batch["image_row"][filled], batch["image_positions"][filled], strict=True):
            claimed[row, positions[positions >= 0]] = True
        assert (claimed == (batch["types"] == IMAGE)).all()
        assert (batch["patches"][~filled] == 0).all()
        assert (np.abs(batch["patches"][filled]).max(axis=(1, 2, 3, 4)) > 0).all()
        assert (batch["loss_weight"][:, :-1][batch["types"][:, 1:] != TEXT] == 0).all()
    assert used > 12


def test_pictures_of_several_sizes_share_a_batch(settings):
    sizes = ((96, 32), (64, 48), (48, 24))
    mixture = Mixture(rows={"short": 1.0}, samples={"image": 1.0, "add2": 0.5})
    batch = next(batches(replace(settings, image_sizes=sizes, mixture=mixture, images=40), seed=3))
    grids = {tuple(grid) for grid in batch["grid"]}
    planned = [plan_grid(width, height, VISION) for width, height in sizes]
    assert grids == {(grid.vit_rows, grid.vit_cols) for grid in planned}
    tokens = {(grid.vit_rows, grid.vit_cols): grid.rows * grid.cols for grid in planned}
    for grid, row, positions in zip(batch["grid"], batch["image_row"], batch["image_positions"], strict=True):
        if row >= 0:
            assert (positions >= 0).sum() == tokens[tuple(grid)]


def test_image_slots_run_out_gracefully(settings):
    mixture = Mixture(rows={"short": 1.0}, samples={"image": 0.9, "add2": 0.1})
    for batch in islice(batches(replace(settings, mixture=mixture, images=3), seed=3), 2):
        assert (batch["image_row"] >= 0).sum() == 3
        assert (batch["document"] >= 0).mean() > 0.9


def test_workers_differ_and_seeds_repeat(settings):
    first = next(batches(settings, seed=5, worker=0))
    again = next(batches(settings, seed=5, worker=0))
    other = next(batches(settings, seed=5, worker=1))
    assert all((first[name] == again[name]).all() for name in first)
    assert (first["ids"] != other["ids"]).mean() > 0.5


@pytest.mark.parametrize("kind", ["passkey", "multikey"])
def test_long_samples_begin_their_rows(settings, kind):
    batch = next(batches(replace(settings, mixture=Mixture(rows={kind: 1.0})), seed=2))
    words = {"passkey": "passkey", "multikey": "The code of the"}
    for ids, document in zip(batch["ids"], batch["document"], strict=True):
        assert words[kind] in TOKENIZER.decode([int(i) for i in ids[document == 0]])


def test_a_sequence_that_does_not_fit_is_an_error():
    grid = plan_grid(96, 32, VISION)
    builder = BatchBuilder(1, 8, 1, BOS_ID, PAD_ID, [grid], 8)
    sequence = Rendered(np.array([BOS_ID] * 9, np.int32), np.ones(9, np.float32), np.full(9, TEXT, np.int8))
    with pytest.raises(ValueError, match="8 places left"):
        builder.append(0, sequence)


def test_corpus_ids_hold_whole_documents(settings):
    ids = np.fromfile(settings.corpus, np.uint16)
    assert ids[0] == BOS_ID
    assert ids[-1] == EOS_ID
    spans = np.split(ids, np.flatnonzero(ids == BOS_ID)[1:])
    assert sorted(TOKENIZER.decode([int(i) for i in span]) for span in spans) == sorted(DOCUMENTS)


def test_corpus_is_cut_at_a_document():
    ids = tokenise(DOCUMENTS, TOKENIZER, largest=6000)
    assert 1000 < len(ids) <= 6000
    assert ids[-1] == EOS_ID


def test_corpus_pieces(settings):
    corpus = Corpus(settings.corpus, TOKENIZER)
    rng = stream(Split.TRAIN, 1)
    pieces = [corpus.piece(rng, 100) for _ in range(20)]
    assert {len(piece) for piece in pieces} == {100}
    assert {int(piece[0]) for piece in pieces} == {BOS_ID}
    assert len({piece.tobytes() for piece in pieces}) > 10
    passages = corpus.passages(rng, 2000)
    assert passages
    assert set(passages) <= set(DOCUMENTS)
