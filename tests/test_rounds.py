"""Replayed rounds against speculative decoding done step by step."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from random_models import build, prompt, tiny
from torch import Tensor

from deepinfer.reference import attention
from deepinfer.reference.model import ReferenceModel
from deepinfer.speculative import rounds as rounds_module
from deepinfer.speculative.rounds import Round, greedy_rounds, mean_accepted_length, walk
from deepinfer.text.images import END, IMAGE, NEWLINE, START, TEXT, ImageInput, plan_grid

pytestmark = pytest.mark.slow

PROMPT = 9
END_TOKEN = 3


@pytest.fixture(autouse=True)
def smooth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without roundings, runs over other numbers of rows agree closely."""
    monkeypatch.setattr(attention, "window_fp8", lambda x: x)


def agreeing(seed: int = 0) -> ReferenceModel:
    """A model whose drafter is often right.

    Its layers are damped, so that a token is nearly a function of the token before; the drafter's bigram bias is that
    function, except for one token in five, and its parallel pass adds a little.
    """
    model = build(tiny(dspark_markov_rank=64), seed)
    generator = torch.Generator().manual_seed(seed)
    for layer in model.layers:
        layer.attn.wo_b.weight.data *= 0.05
        layer.ffn.shared_experts.w2.weight.data *= 0.05
        layer.ffn.experts.w2.data *= 0.05
    last = model.mtp[-1]
    last.norm.weight.data *= 0.05
    last.markov_head.head.weight.data = model.head.weight.data.clone()
    learned = model.norm(model.embed.weight.data)
    wrong = torch.rand(len(learned), 1, generator=generator) < 0.2
    last.markov_head.embed.weight.data = torch.where(wrong, learned.roll(1, 0), learned)
    return model


MODEL = agreeing()
CONFIG = MODEL.config
BLOCK = CONFIG.dspark_block_size


def target_choice(model: ReferenceModel, ids: list[int], replay_start: int | None) -> int:
    start = None if replay_start is None else torch.tensor([replay_start])
    return int(model(torch.tensor([ids]), None, None, start, compact=start is not None).logits[0, -1].argmax())


def decode(model: ReferenceModel, ids: list[int], count: int, replay_start: int | None = None) -> list[int]:
    """Plain greedy decoding of `count` tokens, or fewer if the end token comes."""
    ids = list(ids)
    for _ in range(count):
        ids.append(target_choice(model, ids, replay_start))
        if ids[-1] == END_TOKEN:
            break
    return ids


def decode_speculatively(
    model: ReferenceModel, ids: list[int], length: int, replay_start: int | None = None
) -> tuple[list[int], list[Round]]:
    """Speculative decoding as an engine does it: draft from what is known, verify, keep, until `length` or the end."""
    rounds: list[Round] = []
    ids = [*ids, target_choice(model, ids, replay_start)]
    while len(ids) < length and ids[-1] != END_TOKEN:
        position = len(ids) - 1
        start = None if replay_start is None else torch.tensor([replay_start])
        output = model(torch.tensor([ids[:-1]]), None, None, start, compact=start is not None)
        block = model.draft(torch.tensor(ids), output.features[0], torch.tensor([position]), output.first)
        accepted = judged = 0
        for draft in block.tokens[0].tolist():
            judged += 1
            if target_choice(model, ids, replay_start) != draft:
                break
            accepted += 1
            ids.append(draft)
            if draft == END_TOKEN or len(ids) == length:
                break
        ended = ids[-1] == END_TOKEN or len(ids) == length
        if not ended:
            ids.append(target_choice(model, ids, replay_start))
        rounds.append(Round(position, accepted, judged, accepted + (not ended), tuple(block.confidence[0].tolist())))
    return ids, rounds


def same_rounds(found: list[Round], expected: list[Round]) -> None:
    """Equal, where `judged` of a broken-off block counts all drafts inside the sequence."""
    outline = [(one.position, one.accepted, one.emitted) for one in found]
    assert outline == [(one.position, one.accepted, one.emitted) for one in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.judged >= other.judged
        torch.testing.assert_close(torch.tensor(one.confidence), torch.tensor(other.confidence), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("replay_start", [None, 0, PROMPT - 2], ids=["no replay", "whole replay", "suffix"])
def test_replayed_rounds_are_those_of_speculative_decoding(seed: int, replay_start: int | None) -> None:
    start = prompt(MODEL, PROMPT, seed)[0].tolist()
    ids = decode(MODEL, start, 24, replay_start)
    again, expected = decode_speculatively(MODEL, start, PROMPT + 24, replay_start)
    assert again == ids
    same_rounds(greedy_rounds(MODEL, torch.tensor(ids), PROMPT, replay_start), expected)


def test_the_model_of_these_tests_accepts_and_rejects() -> None:
    """Else they would show little."""
    seen: set[int] = set()
    for seed in range(4):
        ids = decode(MODEL, prompt(MODEL, PROMPT, seed)[0].tolist(), 24)
        seen |= {round_.accepted for round_ in greedy_rounds(MODEL, torch.tensor(ids), PROMPT)}
    assert {0, BLOCK} < seen


def test_anchors_may_be_drafted_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.tensor(decode(MODEL, prompt(MODEL, PROMPT)[0].tolist(), 24))
    whole = greedy_rounds(MODEL, ids, PROMPT)
    monkeypatch.setattr(rounds_module, "ANCHORS_AT_ONCE", 3)
    same_rounds(greedy_rounds(MODEL, ids, PROMPT), whole)


def test_images_of_the_prompt_are_seen() -> None:
    assert CONFIG.vision is not None
    grid = plan_grid(32, 32, CONFIG.vision)
    patch = CONFIG.vision.patch_size
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(grid.vit_rows * grid.vit_cols, 3, patch, patch, generator=generator)
    image = ImageInput(pixels, grid)
    types = torch.tensor([TEXT, START, *([IMAGE] * grid.cols + [NEWLINE]) * grid.rows, END, *[TEXT] * 6]).to(torch.int8)
    ids = torch.where(types == TEXT, 7, CONFIG.image_token_id or 0)
    seen = greedy_rounds(MODEL, ids, len(ids) - 5, types=types, images=[image])
    other = greedy_rounds(MODEL, ids, len(ids) - 5, types=types, images=[ImageInput(-pixels, grid)])
    assert seen[0].position == len(ids) - 5
    assert seen[0].confidence != other[0].confidence


class TestFeaturesFromAPosition:
    """`ReferenceModel.draft` with features that begin later than the sequence."""

    ids: Tensor = prompt(MODEL, 20)[0]
    features: Tensor = MODEL(prompt(MODEL, 20)).features[0]
    anchor = 15

    def draft(self, first: int) -> Tensor:
        return MODEL.draft(self.ids, self.features[first:], torch.tensor([self.anchor]), first).base_logits

    @pytest.mark.parametrize("first", [1, 5, 9])
    def test_nothing_changes_while_the_window_is_whole(self, first: int) -> None:
        assert self.anchor - first >= CONFIG.sliding_window
        torch.testing.assert_close(self.draft(first), self.draft(0))

    @pytest.mark.parametrize("first", [10, 14])
    def test_tokens_before_are_hidden(self, first: int) -> None:
        assert not torch.allclose(self.draft(first), self.draft(0), atol=1e-4)
        # Hidden means left out of the softmax: one token's features alone are not those of a shifted window.
        shifted = MODEL.draft(self.ids, self.features[first:], torch.tensor([self.anchor]), first - 1).base_logits
        assert not torch.allclose(self.draft(first), shifted, atol=1e-4)


@dataclass(frozen=True)
class Walk:
    ids: list[int]
    prompt_length: int
    drafts: list[list[int]]


@st.composite
def walks(draw: st.DrawFn) -> Walk:
    """A sequence over few tokens, and blocks that are often right."""
    token = st.integers(0, 2)
    ids = draw(st.lists(token, min_size=2, max_size=24))
    prompt_length = draw(st.integers(1, len(ids)))
    block = draw(st.integers(1, 5))
    drafts = draw(
        st.lists(
            st.lists(token, min_size=block, max_size=block),
            min_size=len(ids) - prompt_length,
            max_size=len(ids) - prompt_length,
        )
    )
    return Walk(ids, prompt_length, drafts)


class TestWalk:
    @given(walks())
    def test_tokens_come_out_once_and_in_order(self, case: Walk) -> None:
        confidence = [[float(at)] for at in range(len(case.drafts))]
        rounds = walk(case.ids, case.prompt_length, case.drafts, confidence)
        made = case.ids[: case.prompt_length + 1]
        for round_ in rounds:
            assert round_.position == len(made) - 1
            at = round_.position - case.prompt_length
            assert round_.confidence == (float(at),)
            accepted = case.drafts[at][: round_.accepted]
            left = len(case.ids) - len(made)
            assert round_.judged == min(len(case.drafts[at]), left)
            made += accepted
            if round_.emitted > round_.accepted:
                assert round_.emitted == round_.accepted + 1
                if round_.accepted < round_.judged:  # a draft was refused: it was not what the target said
                    assert case.drafts[at][round_.accepted] != case.ids[len(made)]
                made.append(case.ids[len(made)])
            else:
                assert len(made) == len(case.ids)
        assert made == case.ids

    def test_an_accepted_end_leaves_no_room_for_a_bonus(self) -> None:
        ids = [8, 5, 6, END_TOKEN]
        (found,) = walk(ids, 1, [[6, END_TOKEN, 9, 9], [0] * 4], [[0.0] * 4] * 2)
        assert (found.accepted, found.judged, found.emitted) == (2, 2, 2)

    def test_the_end_may_be_the_bonus(self) -> None:
        ids = [8, 5, 6, END_TOKEN]
        (found,) = walk(ids, 1, [[6, 9, 9, 9], [0] * 4], [[0.0] * 4] * 2)
        assert (found.accepted, found.judged, found.emitted) == (1, 2, 2)

    @pytest.mark.parametrize("length", [4, 5])
    def test_a_reply_of_one_token_or_none_takes_no_round(self, length: int) -> None:
        ids = prompt(MODEL, length)[0]
        assert greedy_rounds(MODEL, ids, 4) == []


def test_mean_accepted_length_counts_the_bonus() -> None:
    rounds = walk([8, 5, 6, 7, 8, END_TOKEN], 1, [[6, 7], [0, 0], [0, 0], [0, 0]], [[0.0, 0.0]] * 4)
    assert [round_.emitted for round_ in rounds] == [3, 1]
    assert mean_accepted_length(rounds) == 2
    with pytest.raises(ValueError, match="at least one"):
        mean_accepted_length([])
