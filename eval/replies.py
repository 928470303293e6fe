"""Greedy replies to exercises, through the public API."""

from collections.abc import Sequence
from dataclasses import dataclass

from deepinfer import LLM, SamplingParams
from eval.questions import Question
from train.tasks import check


@dataclass(frozen=True)
class Reply:
    """What a model said.

    token_ids: the generated tokens, the end token included. content: their text without the reasoning.
    correct: the checker's verdict on the content.
    """

    question: Question
    token_ids: tuple[int, ...]
    content: str
    correct: bool


def answer(llm: LLM, questions: Sequence[Question], shown: bool = True) -> list[Reply]:
    """Answer every question greedily, in batches; replies stand in the order of the questions.

    RequestError if one of them cannot be served, now or when it ran: a missing reply is not a wrong one.
    """
    outputs = llm.chat(
        [question.sample.messages for question in questions],
        [SamplingParams(temperature=0, max_tokens=question.most_tokens) for question in questions],
        thinking=[question.sample.thinking for question in questions],
        use_tqdm=shown,
    )
    replies = []
    for question, output in zip(questions, outputs, strict=True):
        if output.error is not None:
            raise output.error
        content = output.outputs[0].content or ""
        replies.append(Reply(question, output.token_ids, content, check(question.sample, content)))
    return replies
