"""Conversations to token ids in the V4.1 chat format, and the model's token ids back to a reply."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import deepseek_recipe as recipe

from deepinfer.core.errors import RequestError
from deepinfer.text.messages import Message, image_number, take_images, unused_placeholder
from deepinfer.text.reply import ParsedReply, ReplyFormat, ReplyParser
from deepinfer.text.sources import ImageLike
from deepinfer.text.spellings import IMAGE
from deepinfer.text.tokenizer import Tokenizer

EFFORTS = ("low", "high", "xhigh", "max")
_MODEL = "DeepSeek-V4.1-Flash"


@dataclass(frozen=True)
class EncodedChat:
    """A prompt: ids with one image id per image, the images in the order of these ids, how to parse the reply."""

    ids: list[int]
    images: list[ImageLike]
    reply: ReplyFormat


class ChatFormat:
    """Encodes chats for one vocabulary and parses replies; one call leaves no trace in the next."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Keep the tokenizer; whether it has the chat spellings is checked when a chat needs them."""
        self._tokenizer = tokenizer
        self._parser = ReplyParser(tokenizer)
        self._renderer = _Renderer(unused_placeholder([]))

    def encode(
        self,
        messages: Sequence[Message],
        *,
        thinking: bool = True,
        reasoning_effort: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] = "auto",
        response_format: Mapping[str, Any] | None = None,
    ) -> EncodedChat:
        """Render messages in OpenAI form and encode them.

        A message has a role (system, developer, user, assistant, tool, latest_reminder) and content: a str, or a list
        of text, image_url and image parts. Assistant messages may carry reasoning_content and tool_calls; a last one
        with `prefix: True` is continued instead of answered. `reasoning_effort` is low, high, xhigh or max and only
        matters with thinking. `tools` are OpenAI function tools; `tool_choice` may force one only without thinking.
        `response_format` is text, json_object, json_schema or {"type": "regex", "regex": str}: the first three are
        told to the model, none is enforced here. RequestError for anything else, and where the vocabulary lacks a
        spelling that the prompt needs.
        """
        options = {
            "reasoning_effort": _known_effort(reasoning_effort),
            "tools": tools,
            "tool_choice": tool_choice if tools else None,
            "response_format": response_format,
        }
        body = {key: value for key, value in options.items() if value is not None}
        plain_messages, images = take_images(messages)
        body |= {"messages": plain_messages, "thinking": {"type": "enabled" if thinking else "disabled"}}
        renderer = self._renderer_with(unused_placeholder(plain_messages))
        rendered, parsing = renderer.render(body)
        ids = self._encode_rendered(rendered, renderer.placeholder)
        ordered = [images[image_number(source.url)] for source in rendered.image_sources]
        self._check_placeholders(ids, ordered, len(images))
        last = plain_messages[-1]
        continued = last["role"] == "assistant" and bool(last.get("prefix"))
        return EncodedChat(ids, ordered, ReplyFormat.from_options(parsing, continued))

    def parse(self, ids: Sequence[int], reply: ReplyFormat | None = None) -> ParsedReply:
        """Split the ids that the model produced into reasoning, content and tool calls; see `ReplyParser.parse`."""
        return self._parser.parse(ids, reply or ReplyFormat())

    def _renderer_with(self, placeholder: str) -> "_Renderer":
        return self._renderer if placeholder == self._renderer.placeholder else _Renderer(placeholder)

    def _encode_rendered(self, rendered: recipe.RenderedPrompt, placeholder: str) -> list[int]:
        """Only the ranges that the renderer marked are control tokens; the text between is encoded as plain text."""
        prompt, done = rendered.prompt, 0
        ids: list[int] = []
        for start, end in rendered.special_ranges:
            if start > done:
                ids += self._tokenizer.encode(prompt[done:start])
            spelling = prompt[start:end]
            ids.append(self._control_id(IMAGE if spelling == placeholder else spelling))
            done = end
        return ids + self._tokenizer.encode(prompt[done:]) if done < len(prompt) else ids

    def _control_id(self, spelling: str) -> int:
        token_id = self._tokenizer.token_id(spelling)
        if token_id is None:
            raise RequestError(
                f"{self._tokenizer.where} has no added token {spelling!r}, which this chat needs; use plain text "
                "generation, or a checkpoint whose tokenizer holds deepinfer.text.spellings.PROTOCOL_SPELLINGS"
            )
        return token_id

    def _check_placeholders(self, ids: Sequence[int], ordered: Sequence[ImageLike], given: int) -> None:
        places = ids.count(self._tokenizer.token_id(IMAGE)) if given else 0
        if not places == len(ordered) == given:
            raise RequestError(f"{given} images were given but the prompt has {places} places for them")


def _known_effort(effort: str | None) -> str | None:
    if effort not in (None, *EFFORTS):
        raise RequestError(f"reasoning_effort {effort!r} is unknown; expected one of {', '.join(EFFORTS)}")
    return effort


class _Renderer:
    """deepseek-recipe's request conversion and prompt rendering, with one spelling for image placeholders."""

    def __init__(self, placeholder: str) -> None:
        # Without a spelling of our own the renderer would write `<｜image｜>`, which V4.1 does not have.
        spellings = recipe.SpecialTokens(image=placeholder)
        self.placeholder = placeholder
        self._options = recipe.ConversionOptions().with_special_tokens(spellings)
        self._encoding = recipe.DeepseekV41Encoding().with_special_tokens(spellings)

    def render(self, body: dict[str, Any]) -> tuple[recipe.RenderedPrompt, recipe.ParsingOptions]:
        """Return the prompt, and how its reply is to be parsed.

        The sampling parameters that the conversion makes up (temperature 1 with thinking) are left unread.
        """
        try:
            request = recipe.ChatCompletionRequest({"model": _MODEL, **body}).convert(self._options)
            return self._encoding.render_conversation(request.conversation), request.parsing_options
        except (recipe.ConversionError, ValueError, TypeError, RuntimeError) as error:
            raise RequestError(f"this chat cannot be rendered: {error}") from error
