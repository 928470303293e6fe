"""The model's token ids, split into reasoning, answer and tool calls."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any

import deepseek_recipe as recipe

from deepinfer.text.spellings import EOS, IMAGE
from deepinfer.text.tokenizer import Tokenizer

_STAGE = recipe.ThinkingInitialStage


class Opening(Enum):
    """What the first token of a reply belongs to, as the end of the prompt decided it."""

    ANSWER = "answer"
    REASONING = "reasoning"
    CONTINUED_ANSWER = "continued answer"
    CONTINUED_REASONING = "continued reasoning"
    TOOL_CALLS = "tool calls"


_STAGES = {
    Opening.REASONING: _STAGE.ReasoningStart,
    Opening.CONTINUED_ANSWER: _STAGE.ContentContinuation,
    Opening.CONTINUED_REASONING: _STAGE.ReasoningContinuation,
}


@dataclass(frozen=True)
class ReplyFormat:
    """How to read a reply: what it opens with, whether to parse tool calls, whether to keep only its JSON."""

    opening: Opening = Opening.REASONING
    tools: bool = True
    json: bool = False

    @classmethod
    def from_options(cls, options: recipe.ParsingOptions, continued: bool) -> "ReplyFormat":
        """Take over what the request conversion decided; `continued` if the prompt ends in an answer's beginning."""
        opening = Opening.ANSWER
        if options.starts_in_tool_calls:
            opening = Opening.TOOL_CALLS
        elif options.thinking_initial_stage is not None:
            opening = next(key for key, stage in _STAGES.items() if stage == options.thinking_initial_stage)
        elif continued:  # without this its leading newlines, which belong to the text before them, would be lost
            opening = Opening.CONTINUED_ANSWER
        return cls(opening, options.parse_tool_calls, options.parse_json_output)

    def options(self) -> recipe.ParsingOptions:
        """Return fresh parser settings."""
        return recipe.ParsingOptions(
            parse_tool_calls=self.tools,
            starts_in_tool_calls=self.opening is Opening.TOOL_CALLS,
            parse_json_output=self.json,
            thinking_initial_stage=_STAGES.get(self.opening),
            special_tokens=recipe.SpecialTokens(image=IMAGE),
        )


@dataclass(frozen=True)
class ParsedToolCall:
    """One call; `arguments` is JSON text as the model wrote it, incomplete if the reply was cut, never validated."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class ParsedReply:
    """A reply: the answer's text, the reasoning before it (None without any), and the tool calls."""

    content: str
    reasoning: str | None
    tool_calls: list[ParsedToolCall]


class ReplyParser:
    """Parses whole replies for one vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._eos = tokenizer.token_id(EOS)
        self._json = tokenizer.json

    @cached_property
    def _tokenizer(self) -> recipe.Tokenizer:
        """Built with the first reply: it takes half a second, and those who only encode need none."""
        return recipe.Tokenizer.from_str(self._json)

    def parse(self, ids: Sequence[int], reply: ReplyFormat) -> ParsedReply:
        """Parse a finished or cut reply; EOS and whatever follows it is not read.

        Text that only looks like a control token (`</think>` in plain pieces) stays text. A character cut in its
        middle is dropped. With `reply.json`, text around the JSON becomes spaces.
        """
        ids = list(ids)
        if self._eos in ids:
            ids = ids[: ids.index(self._eos)]  # pushed, it would come out as text
        # Generators are consumed by use, so each reply has its own.
        stream = recipe.StreamProcessor(_generator(), reply.options(), self._tokenizer)
        events = stream.push(recipe.InferenceChunk.ready())
        for token_id in ids:  # one a chunk: a chunk that ends inside a character is held back whole
            events += stream.push(recipe.InferenceChunk.tokens([token_id]))
        events += stream.push(recipe.InferenceChunk.finish(recipe.InferenceFinishReason.Stop)) + stream.finish()
        response = recipe.ChatCompletionResponse("", "", 0, 0, 0)
        for event in events:
            if isinstance(event, recipe.ChatCompletionChunk):  # always, with a Chat Completions generator
                response.accumulate(event)
        return _reply(json.loads(response.to_json())["choices"][0]["message"])


def _generator() -> recipe.ChatCompletionChunkGenerator:
    """A generator takes names and usage options from its request; the parser needs none of them."""
    request = recipe.ConversationRequest(recipe.Conversation([]), recipe.ModelVersion.DeepseekV41Flash)
    return recipe.ChatCompletionRequest.chunk_generator(request, "", "")


def _reply(message: dict[str, Any]) -> ParsedReply:
    calls = message.get("tool_calls") or []
    return ParsedReply(
        content=message.get("content") or "",
        reasoning=message.get("reasoning_content"),
        tool_calls=[ParsedToolCall(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in calls],
    )
