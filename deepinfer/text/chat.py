"""Conversations to token ids in the V4.1 chat format, and the model's token ids back to a reply."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import deepseek_recipe as recipe

from deepinfer.core.errors import RequestError
from deepinfer.text.messages import ImageLike, Message, MessageReader, read_tool
from deepinfer.text.reply import Opening, ParsedReply, ReplyFormat, ReplyParser
from deepinfer.text.spellings import DSML, END_THINK, IMAGE, THINK
from deepinfer.text.tokenizer import Tokenizer

EFFORTS = ("low", "high", "xhigh", "max")


@dataclass(frozen=True)
class EncodedChat:
    """A prompt: ids with one placeholder id per image, the images in the order of the placeholders, how to parse."""

    ids: list[int]
    images: list[ImageLike]
    reply: ReplyFormat = field(default_factory=ReplyFormat)


class ChatFormat:
    """Encodes chats for one vocabulary and parses replies; holds no state between calls."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Keep the tokenizer; whether it has the chat spellings is checked when a chat needs them."""
        self._tokenizer = tokenizer
        self._encoding = recipe.DeepseekV41Encoding().with_special_tokens(recipe.SpecialTokens(image=IMAGE))
        self._parser = ReplyParser(tokenizer)

    def encode(
        self,
        messages: Sequence[Message],
        *,
        thinking: bool = True,
        reasoning_effort: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str = "auto",
        response_format: Mapping[str, Any] | None = None,
    ) -> EncodedChat:
        """Render messages in OpenAI form and encode them.

        A message has a role (system, developer, user, assistant, tool, latest_reminder) and content: a str, or a list
        of text, image_url and image parts. Assistant messages may carry reasoning_content and tool_calls; a last one
        with `prefix: True` is continued instead of answered. `reasoning_effort` is low, high, xhigh or max and only
        matters with thinking. `tool_choice` is auto, none or required (required only without thinking).
        `response_format` is OpenAI's text, json_object or json_schema: it is told to the model, not enforced.
        RequestError for anything else, and where the vocabulary lacks a spelling that the prompt needs.
        """
        reader = MessageReader(messages)
        conversation = self._conversation(
            reader, messages, thinking, reasoning_effort, tools, tool_choice, response_format
        )
        rendered = self._encoding.render_conversation(conversation)
        images = [reader.images[int(source.path)] for source in rendered.image_sources]
        ids, spellings = self._encode_rendered(rendered, reader.placeholder)
        if spellings.count(IMAGE) != len(reader.images):
            raise RequestError(
                f"{len(reader.images)} images but {spellings.count(IMAGE)} places for them in the prompt"
            )
        continued = bool(messages[-1].get("prefix"))
        use_tools = bool(tools) and tool_choice != "none"
        return EncodedChat(ids, images, ReplyFormat(_opening(spellings, continued), use_tools))

    def parse(self, ids: Sequence[int], reply: ReplyFormat | None = None) -> ParsedReply:
        """Split the ids that the model produced into reasoning, content and tool calls; see `ReplyParser.parse`."""
        return self._parser.parse(ids, reply or ReplyFormat())

    def _conversation(
        self,
        reader: MessageReader,
        messages: Sequence[Message],
        thinking: bool,
        reasoning_effort: str | None,
        tools: Sequence[Mapping[str, Any]] | None,
        tool_choice: str,
        response_format: Mapping[str, Any] | None,
    ) -> recipe.Conversation:
        _check_options(messages, thinking, reasoning_effort, tools, tool_choice)
        read = [reader.read(message, f"messages[{i}]") for i, message in enumerate(messages)]
        read_tools = [read_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools or [])]
        options: dict[str, Any] = {
            "tool_choice": tool_choice,
            "reasoning_effort": reasoning_effort if thinking else None,
        }
        options |= _format_options(response_format)
        return recipe.Conversation(
            read,
            thinking_mode=thinking,
            tools=None if tool_choice == "none" else read_tools or None,
            **options,
        )

    def _encode_rendered(self, rendered: recipe.RenderedPrompt, placeholder: str) -> tuple[list[int], list[str]]:
        """Return ids and, in order, the spellings of the control tokens among them.

        Only the ranges that the renderer marked are control tokens; all text between is encoded as plain text.
        """
        prompt, ids, spellings, done = rendered.prompt, [], [], 0
        for start, end in rendered.special_ranges:
            spelling = prompt[start:end]
            spellings.append(IMAGE if spelling == placeholder else spelling)
            if start > done:
                ids += self._tokenizer.encode(prompt[done:start])
            ids.append(self._control_id(spellings[-1]))
            done = end
        if done < len(prompt):
            ids += self._tokenizer.encode(prompt[done:])
        return ids, spellings

    def _control_id(self, spelling: str) -> int:
        token_id = self._tokenizer.token_id(spelling)
        if token_id is None:
            raise RequestError(
                f"{self._tokenizer.where} has no added token {spelling!r}, which this chat needs; use plain text "
                "generation, or a checkpoint whose tokenizer holds deepinfer.text.spellings.PROTOCOL_SPELLINGS"
            )
        return token_id


def _check_options(
    messages: Sequence[Message],
    thinking: bool,
    reasoning_effort: str | None,
    tools: Sequence[Mapping[str, Any]] | None,
    tool_choice: str,
) -> None:
    if isinstance(messages, str | Mapping) or not messages:
        raise RequestError("messages must be a non-empty list of dicts with role and content")
    if reasoning_effort not in (None, *EFFORTS):
        raise RequestError(f"reasoning_effort {reasoning_effort!r} is unknown; expected one of {', '.join(EFFORTS)}")
    if tool_choice not in ("auto", "none", "required"):
        raise RequestError(f"tool_choice {tool_choice!r} is unknown; expected auto, none or required")
    if tool_choice == "required" and (thinking or not tools):
        raise RequestError("tool_choice 'required' needs tools and thinking off: with thinking the prompt ends in it")
    prefixes = [i for i, message in enumerate(messages) if isinstance(message, Mapping) and message.get("prefix")]
    if prefixes and (prefixes != [len(messages) - 1] or messages[-1].get("role") != "assistant"):
        raise RequestError(f"messages[{prefixes[0]}]: only a last message of role 'assistant' can be a prefix")


def _format_options(response_format: Mapping[str, Any] | None) -> dict[str, Any]:
    kind = response_format.get("type") if isinstance(response_format, Mapping) else response_format
    if kind is None or kind == "text":
        return {}
    if kind == "json_object":
        return {"response_format": "json_object"}
    named = response_format.get("json_schema") if isinstance(response_format, Mapping) else None
    if kind == "json_schema" and isinstance(named, Mapping) and isinstance(named.get("schema"), Mapping):
        return {"response_schema": dict(named["schema"])}
    raise RequestError(
        "response_format must be {'type': 'text'}, {'type': 'json_object'} or "
        f"{{'type': 'json_schema', 'json_schema': {{'schema': dict}}}}, got {response_format!r:.80}"
    )


def _opening(spellings: Sequence[str], continued: bool) -> Opening:
    """Tell from the prompt's last control tokens what the model's first token belongs to."""
    last = spellings[-1]
    if last == DSML:
        return Opening.TOOL_CALLS
    if last == THINK:
        return Opening.CONTINUED_REASONING if continued else Opening.REASONING
    if last == END_THINK:
        return Opening.CONTINUED_ANSWER if continued else Opening.ANSWER
    raise RequestError(f"a prompt that ends after {last!r} leaves the model nothing to answer")
