"""The model's token ids, split into reasoning, answer and tool calls."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

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


# A continued answer keeps its leading newlines, with thinking off too: they belong to the text before them.
_STAGES = {
    Opening.REASONING: _STAGE.ReasoningStart,
    Opening.CONTINUED_ANSWER: _STAGE.ContentContinuation,
    Opening.CONTINUED_REASONING: _STAGE.ReasoningContinuation,
}


@dataclass(frozen=True)
class ReplyFormat:
    """How to read a reply: what it opens with, and whether tool-call markup is to be parsed."""

    opening: Opening = Opening.REASONING
    tools: bool = True


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
        self._tokenizer = recipe.Tokenizer.from_str(tokenizer.json)
        # Only names the conversation that a generator wants; the parser reads none of it.
        self._version = recipe.ModelVersion.DeepseekV41Flash

    def parse(self, ids: Sequence[int], reply: ReplyFormat) -> ParsedReply:
        """Parse a finished or cut reply; a final EOS is ignored, ids after one are not read.

        Text that only looks like a control token (`</think>` in plain pieces) stays text. A character cut in its
        middle is dropped.
        """
        ids = list(ids)
        if self._eos in ids:
            ids = ids[: ids.index(self._eos)]  # pushed, it would come out as text
        stream = recipe.StreamProcessor(self._generator(), _options(reply), self._tokenizer)
        events = stream.push(recipe.InferenceChunk.ready())
        events += stream.push(recipe.InferenceChunk.tokens(ids))
        events += stream.push(recipe.InferenceChunk.finish(recipe.InferenceFinishReason.Stop)) + stream.finish()
        response = recipe.ChatCompletionResponse("", "", 0, 0, 0)
        for event in events:
            if isinstance(event, recipe.ChatCompletionChunk):  # always, with a Chat Completions generator
                response.accumulate(event)
        return _reply(json.loads(response.to_json())["choices"][0]["message"])

    def _generator(self) -> recipe.ChatCompletionChunkGenerator:
        request = recipe.ConversationRequest(recipe.Conversation([]), self._version)
        return recipe.ChatCompletionRequest.chunk_generator(request, "", "")


def _options(reply: ReplyFormat) -> recipe.ParsingOptions:
    return recipe.ParsingOptions(
        parse_tool_calls=reply.tools,
        starts_in_tool_calls=reply.opening is Opening.TOOL_CALLS,
        thinking_initial_stage=_STAGES.get(reply.opening),
        special_tokens=recipe.SpecialTokens(image=IMAGE),
    )


def _reply(message: dict[str, object]) -> ParsedReply:
    calls = message.get("tool_calls") or []
    assert isinstance(calls, list)
    return ParsedReply(
        content=str(message.get("content") or ""),
        reasoning=None if message.get("reasoning_content") is None else str(message["reasoning_content"]),
        tool_calls=[ParsedToolCall(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in calls],
    )
