"""Held-out exercises as the engine reads them, its replies, and what the reference model makes of these."""

import dataclasses
from pathlib import Path

import pytest
import tiny
import torch

from deepinfer import LLM, ConfigError, RequestError, SamplingParams
from deepinfer.core.outputs import CompletionOutput, RequestOutput
from deepinfer.text.chat import ChatFormat
from eval.questions import COUNTS, Question, QuestionMaker, heldout_documents
from eval.replies import answer
from eval.target import Target

SHORT = ("add2", "add3", "json", "image")


@pytest.fixture(scope="module")
def target(tiny_checkpoint: Path) -> Target:
    return Target(tiny_checkpoint)


@pytest.fixture(scope="module")
def maker(target: Target) -> QuestionMaker:
    return QuestionMaker(target.config, target.tokenizer)


@pytest.fixture(scope="module")
def llm(tiny_checkpoint: Path) -> LLM:
    return LLM(tiny_checkpoint)


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that knows nothing does not end its replies; a few tokens of them do."""
    monkeypatch.setattr(Question, "most_tokens", property(lambda question: 24))


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
    def test_the_expected_reply_ends(self, task: str, maker: QuestionMaker, target: Target) -> None:
        for question in maker.make({task: 5}, "test", 0):
            assert question.expected[-1] == target.config.eos_token_id
            assert target.tokenizer.decode(question.expected[:-1]).endswith(question.sample.answer)

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
    def test_replies_are_greedy_judged_and_in_order(self, maker: QuestionMaker, llm: LLM) -> None:
        questions = maker.make(dict.fromkeys(SHORT, 1), "test", 1)
        replies = answer(llm, questions, shown=False)
        assert [reply.question for reply in replies] == questions
        assert not any(reply.correct for reply in replies)
        again = answer(llm, questions[1:2], shown=False)
        assert again == replies[1:2]
        for reply in replies:
            assert 1 <= len(reply.token_ids) <= reply.question.most_tokens

    def test_a_right_reply_is_correct_whatever_was_thought(
        self, maker: QuestionMaker, llm: LLM, target: Target, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        questions = maker.make(dict.fromkeys(SHORT, 2), "test", 3)
        chat = ChatFormat(target.tokenizer)

        def output(question: Question, index: int) -> RequestOutput:
            form = chat.encode(question.sample.messages, thinking=question.sample.thinking).reply
            parsed = chat.parse(question.expected[:-1], form)
            completion = CompletionOutput("", question.expected, "stop", parsed.reasoning, parsed.content)
            return RequestOutput(index, None, question.prompt, (completion,))

        made = [output(question, index) for index, question in enumerate(questions)]
        monkeypatch.setattr(llm, "chat", lambda *_, **__: made)
        replies = answer(llm, questions, shown=False)
        assert all(reply.correct for reply in replies)
        assert [reply.content for reply in replies] == [question.sample.answer for question in questions]
        monkeypatch.setattr(llm, "chat", lambda *_, **__: made[1:] + made[:1])
        assert not all(reply.correct for reply in answer(llm, questions, shown=False))

    def test_a_reply_that_failed_is_no_wrong_reply(
        self, maker: QuestionMaker, llm: LLM, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        failed = RequestOutput.failed(0, RequestError("no room"))
        monkeypatch.setattr(llm, "chat", lambda *_, **__: [failed])
        with pytest.raises(RequestError, match="no room"):
            answer(llm, maker.make({"add2": 1}, "test", 0), shown=False)


class TestReplay:
    @pytest.mark.slow
    @pytest.mark.parametrize("mode", ["off", "mask", "compact"])
    def test_the_reference_confirms_the_engines_replies(
        self, mode: str, tiny_checkpoint: Path, maker: QuestionMaker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Prompts longer than the replayed suffix, so the mode matters."""
        monkeypatch.setenv("DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE", mode)
        target = Target(tiny_checkpoint)
        questions = maker.make({"image": 2, "json": 1}, "test", 4)
        assert all(len(question.prompt) > 40 for question in questions)
        for reply in answer(LLM(tiny_checkpoint), questions, shown=False):
            replay = target.replay(reply.question, reply.token_ids)
            assert replay.tokens == len(reply.token_ids)
            assert replay.differing <= replay.tokens // 20  # a random model has near ties
            assert sum(round_.emitted for round_ in replay.rounds) == replay.tokens - 1

    def test_modes_differ(self, tiny_checkpoint: Path, maker: QuestionMaker, monkeypatch: pytest.MonkeyPatch) -> None:
        """Else the test above would show little."""
        (question,) = maker.make({"json": 1}, "test", 4)
        confidence = {}
        for mode in ("off", "mask", "compact"):
            monkeypatch.setenv("DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE", mode)
            rounds = Target(tiny_checkpoint).replay(question, question.expected).rounds
            confidence[mode] = torch.tensor(rounds[0].confidence)
        torch.testing.assert_close(confidence["mask"], confidence["compact"], atol=1e-3, rtol=1e-3)
        assert not torch.allclose(confidence["off"], confidence["compact"], atol=1e-2, rtol=1e-2)

    def test_tokens_of_another_mind_are_counted(self, maker: QuestionMaker, target: Target, llm: LLM) -> None:
        (reply,) = answer(llm, maker.make({"image": 1}, "test", 5), shown=False)
        before = target.replay(reply.question, reply.token_ids).differing
        other = [*reply.token_ids[:-1], (reply.token_ids[-1] + 1) % 256]
        assert target.replay(reply.question, other).differing == before + 1

    def test_an_image_token_is_never_a_choice(self, maker: QuestionMaker, tiny_checkpoint: Path) -> None:
        target = Target(tiny_checkpoint)
        head = target.model.head.weight.data
        head[target.config.image_token_id] = 1e3 * torch.randn(head.shape[1])
        (question,) = maker.make({"image": 1}, "test", 5)
        reply = [target.config.image_token_id] * 4
        assert target.replay(question, reply).differing == 4

    def test_a_model_without_drafter_makes_no_rounds(self, maker: QuestionMaker, tiny_checkpoint: Path) -> None:
        target = Target(tiny_checkpoint)
        target.config = dataclasses.replace(target.config, num_nextn_predict_layers=0)
        (question,) = maker.make({"image": 1}, "test", 5)
        assert target.replay(question, question.expected).rounds == ()
