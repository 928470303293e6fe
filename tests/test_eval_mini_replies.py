"""Held-out exercises as the engine reads them, and greedy replies by two ways that must agree."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepinfer import LLM, ConfigError, SamplingParams
from eval import replies as replies_module
from eval.questions import COUNTS, Question, QuestionMaker, heldout_documents
from eval.replies import answer, guided_greedy
from eval.target import Target
from train.sample import Sample, user

SHORT = ("add2", "add3", "json", "image")
END = 1


@pytest.fixture(scope="module")
def target(tiny_checkpoint: Path) -> Target:
    return Target(tiny_checkpoint)


@pytest.fixture(scope="module")
def maker(target: Target) -> QuestionMaker:
    return QuestionMaker(target.config, target.tokenizer)


@pytest.fixture(scope="module")
def llm(tiny_checkpoint: Path) -> LLM:
    return LLM(tiny_checkpoint)


class TestQuestions:
    @pytest.mark.parametrize("task", SHORT)
    def test_the_prompt_is_what_the_engine_reads(self, task: str, maker: QuestionMaker, llm: LLM) -> None:
        for question in maker.make({task: 3}, "test", 0):
            params = SamplingParams(temperature=0, max_tokens=1)
            output = llm.chat(question.sample.messages, params, thinking=question.sample.thinking, use_tqdm=False)[0]
            assert output.prompt_token_ids == question.prompt
            assert len(question.types) == len(question.prompt)
            assert any(kind != -1 for kind in question.types) == (task == "image") == bool(question.images)

    @pytest.mark.parametrize("task", SHORT)
    def test_the_expected_reply_is_right(self, task: str, maker: QuestionMaker, target: Target) -> None:
        for question in maker.make({task: 5}, "test", 0):
            assert question.expected[-1] == target.config.eos_token_id
            assert target.content(question, question.expected) == question.sample.answer

    def test_a_cut_off_reply_has_the_content_so_far(self, maker: QuestionMaker, target: Target) -> None:
        (question,) = maker.make({"json": 1}, "test", 0)
        assert target.content(question, question.expected[:5]) == question.sample.answer[:5]

    def test_seed_and_purpose_decide(self, maker: QuestionMaker) -> None:
        def prompts(purpose: str, seed: int) -> list[tuple[int, ...]]:
            return [question.prompt for question in maker.make({"add3": 8}, purpose, seed)]

        assert prompts("a", 1) == prompts("a", 1)
        assert not set(prompts("a", 1)) & set(prompts("b", 1)) | set(prompts("a", 1)) & set(prompts("a", 2))

    def test_the_tasks_do_not_disturb_each_other(self, maker: QuestionMaker) -> None:
        together = maker.make({"add2": 2, "json": 3}, "a", 1)
        assert [question.sample.task for question in together] == ["add2"] * 2 + ["json"] * 3
        assert [question.prompt for question in together[2:]] == [q.prompt for q in maker.make({"json": 3}, "a", 1)]

    def test_passkeys_lie_as_far_back_as_promised(self, tmp_path: Path) -> None:
        directory = tiny.write(tmp_path / "checkpoint")
        tiny.edit_config(directory, max_position_embeddings=4096)
        longer = Target(directory)
        for question in QuestionMaker(longer.config, longer.tokenizer).make({"passkey": 5}, "test", 0):
            text = question.sample.messages[0]["content"]
            after = text[text.index(question.sample.expected) :]
            assert 2000 <= len(longer.tokenizer.encode(after)) <= 4000
            assert len(question.prompt) + question.most_tokens <= 4096
            assert longer.content(question, question.expected) == question.sample.answer

    def test_a_model_that_cannot_be_asked_is_named(self, maker: QuestionMaker, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="4096 tokens and this checkpoint has 2048; leave the task passkey out"):
            maker.make({"passkey": 1}, "test", 0)
        assert maker.make({"passkey": 0}, "test", 0) == []

    def test_a_model_that_cannot_see_is_named(self, maker: QuestionMaker, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(maker, "_config", type("Blind", (), {"vision": None, "max_position_embeddings": 4096})())
        with pytest.raises(ConfigError, match="no vision tower; leave the task image out"):
            maker.make({"image": 1}, "test", 0)

    def test_every_task_has_a_count(self) -> None:
        assert all(count >= 20 for count in COUNTS.values())

    def test_there_are_held_out_documents(self) -> None:
        assert len(heldout_documents()) > 20


class TestReplies:
    def test_guided_replies_are_those_of_the_api(self, maker: QuestionMaker, target: Target, llm: LLM) -> None:
        for task in SHORT:
            questions = maker.make({task: 3 if task == "image" else 1}, "test", 1)
            chatted = answer(llm, target, questions, task, shown=False)
            guided = answer(None, target, questions, task, shown=False)
            assert [reply.token_ids for reply in guided] == [reply.token_ids for reply in chatted]
            assert guided == chatted

    def test_long_prompts_are_guided_and_keep_their_place(
        self, maker: QuestionMaker, target: Target, llm: LLM, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        questions = maker.make({"image": 4}, "test", 2)
        lengths = [len(question.prompt) for question in questions]
        assert len(set(lengths)) > 1
        seen: list[int] = []

        def watched(target: Target, question: Question) -> list[int]:
            seen.append(len(question.prompt))
            return guided_greedy(target, question)

        monkeypatch.setattr(replies_module, "guided_greedy", watched)
        monkeypatch.setattr(replies_module, "LONG_PROMPT", min(lengths))
        replies = answer(llm, target, questions, "add2", shown=False)
        assert sorted(seen) == sorted(length for length in lengths if length > min(lengths))
        assert [reply.question for reply in replies] == questions

    def test_a_right_reply_is_correct_and_a_wrong_one_is_not(
        self, maker: QuestionMaker, target: Target, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        questions = maker.make(dict.fromkeys(SHORT, 2), "test", 3)
        monkeypatch.setattr(replies_module, "guided_greedy", lambda _, question: list(question.expected))
        assert all(reply.correct for reply in answer(None, target, questions, "", shown=False))
        monkeypatch.setattr(replies_module, "guided_greedy", lambda _, question: [*question.expected[:1], END])
        assert not any(
            reply.correct
            for reply in answer(None, target, questions, "", shown=False)
            if reply.question.sample.answer != reply.content
        )

    def test_replay_settings_are_the_engines(
        self, tiny_checkpoint: Path, maker: QuestionMaker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A prompt longer than the replayed suffix: each mode gives the logits that the engine's runner gives."""
        question = maker.make({"image": 1}, "test", 4)[0]
        assert len(question.prompt) > 28
        found = {}
        for mode in ("off", "mask", "compact"):
            monkeypatch.setenv("DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE", mode)
            mine, theirs = Target(tiny_checkpoint), LLM(tiny_checkpoint)
            guided = answer(None, mine, [question], "", shown=False)
            assert guided == answer(theirs, mine, [question], "", shown=False)
            _, output = mine.run(question, question.expected)
            found[mode] = output.logits[0, len(question.prompt) - 1 - output.first]
            assert len(mine.choices(output, len(question.prompt))) == len(question.expected) + 1
            assert bool(mine.rounds(question, guided[0].token_ids)) == (len(guided[0].token_ids) > 1)
        torch.testing.assert_close(found["mask"], found["compact"], atol=1e-3, rtol=1e-3)
        assert not torch.allclose(found["off"], found["compact"], atol=1e-3)


class Scripted:
    """Stands in for a Target: its greedy choice is a function of all tokens before."""

    class config:
        eos_token_id = END

    def __init__(self, seed: int, agreeable: int) -> None:
        self.seed, self.agreeable, self.passes = seed, agreeable, 0

    def choice(self, reply: Sequence[int]) -> int:
        return hash((self.seed, tuple(reply))) % self.agreeable

    def run(self, question: Question, reply: Sequence[int]) -> tuple[None, list[int]]:
        self.passes += 1
        return None, [self.choice(reply[:at]) for at in range(len(reply) + 1)]

    def choices(self, output: list[int], prompt_length: int) -> list[int]:
        return output


@given(
    seed=st.integers(0, 10**6),
    agreeable=st.integers(2, 6),
    expected=st.lists(st.integers(2, 5), max_size=12).map(tuple),
)
def test_guided_greedy_is_greedy(seed: int, agreeable: int, expected: tuple[int, ...]) -> None:
    target = Scripted(seed, agreeable)
    question = Question(Sample("add2", [user("")], False, "", 0), (9, 9), (-1, -1), (), (*expected, END))
    plain: list[int] = []
    while len(plain) < question.most_tokens and END not in plain:
        plain.append(target.choice(plain))
    assert guided_greedy(target, question) == plain  # type: ignore[arg-type]
    assert target.passes <= len(plain)


@given(agreeable=st.integers(2, 6), length=st.integers(0, 30))
def test_a_right_guess_takes_one_pass(agreeable: int, length: int) -> None:
    target = Scripted(0, agreeable)
    reply: list[int] = []
    while len(reply) < length and END not in reply:
        reply.append(target.choice(reply))
    question = Question(Sample("add2", [user("")], False, "", 0), (9,), (-1,), (), tuple(reply))
    found = guided_greedy(target, question)  # type: ignore[arg-type]
    assert found[: len(reply)] == reply
    assert target.passes == 1 or END not in reply
