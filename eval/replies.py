"""Greedy replies to exercises: through the public API, and by a shortcut of the same result for long prompts."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from tqdm import tqdm

from deepinfer import LLM, SamplingParams
from eval.questions import Question
from eval.target import Target
from train.tasks import check

LONG_PROMPT = 1024


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


def answer(
    llm: LLM | None, target: Target, questions: Sequence[Question], name: str, shown: bool = True
) -> list[Reply]:
    """Answer every question greedily; replies stand in the order of the questions.

    Prompts of up to LONG_PROMPT tokens run through `llm.chat` in batches. Without a KV cache each token of a reply
    costs a pass over the whole sequence; so the replies to longer prompts, and to all of them without an `llm`, are
    found by `guided_greedy`. `name` stands beside the progress bar, if it is `shown`.
    """
    chatted = [number for number, question in enumerate(questions) if llm and len(question.prompt) <= LONG_PROMPT]
    guided = sorted(set(range(len(questions))) - set(chatted))
    replies: dict[int, Reply] = {}
    if llm is not None and chatted:
        if shown:
            print(f"{name}: {len(chatted)} chats", file=sys.stderr, flush=True)
        found = _chat(llm, [questions[number] for number in chatted], shown)
        replies |= zip(chatted, found, strict=True)
    for number in tqdm(guided, desc=name, disable=not (shown and guided)):
        replies[number] = _guided(target, questions[number])
    return [replies[number] for number in range(len(questions))]


def guided_greedy(target: Target, question: Question) -> list[int]:
    """Greedy decoding that begins with a guess, the expected reply: the same tokens in fewer forward passes.

    A pass over prompt and guess gives the greedy choice at every position. Up to the first one that differs from the
    guess, and including it, these choices are what token by token decoding gives, for each saw only such choices.
    From there the guess is corrected and passed again: at least one further token is settled each time.
    """
    guess = list(question.expected)
    end = target.config.eos_token_id
    while True:
        _, output = target.run(question, guess)
        choices = target.choices(output, len(question.prompt))
        agreed = next((at for at, token in enumerate(guess) if token != choices[at]), len(guess))
        settled = [*guess[:agreed], choices[agreed]][: question.most_tokens]
        if end in settled:
            return settled[: settled.index(end) + 1]
        if len(settled) == question.most_tokens:
            return settled
        guess = settled + guess[len(settled) :]


def _chat(llm: LLM, questions: Sequence[Question], shown: bool) -> list[Reply]:
    outputs = llm.chat(
        [question.sample.messages for question in questions],
        [SamplingParams(temperature=0, max_tokens=question.most_tokens) for question in questions],
        thinking=[question.sample.thinking for question in questions],
        use_tqdm=shown,
    )
    contents = [output.outputs[0].content or "" for output in outputs]
    return [
        Reply(question, output.token_ids, content, check(question.sample, content))
        for question, output, content in zip(questions, outputs, contents, strict=True)
    ]


def _guided(target: Target, question: Question) -> Reply:
    ids = guided_greedy(target, question)
    content = target.content(question, ids)
    return Reply(question, tuple(ids), content, check(question.sample, content))
