"""Chat messages and tools in OpenAI form, turned into the objects that deepseek-recipe renders."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import deepseek_recipe as recipe
from PIL import Image

from deepinfer.core.errors import RequestError

ImageLike = str | Path | bytes | Image.Image
Message = Mapping[str, Any]
_IMAGE_ROLES = ("system", "user", "tool")


class MessageReader:
    """Reads one conversation; collects its images and picks a placeholder that no text of it contains.

    recipe takes the first occurrences of the placeholder in a message for its images, so a placeholder that a user
    can type would let text stand in for an image.
    """

    def __init__(self, messages: Sequence[Message]) -> None:
        self.images: list[ImageLike] = []
        texts = [text for message in messages if isinstance(message, Mapping) for text in _texts(message)]
        self.placeholder = _unused_spelling(texts)

    def read(self, message: Message, where: str) -> recipe.Message:
        """Return the recipe form of one message; RequestError names `where` and what is accepted."""
        if not isinstance(message, Mapping):
            raise RequestError(f"{where}: expected a dict with role and content, got {type(message).__name__}")
        role = message.get("role")
        build = _BUILDERS.get(role) if isinstance(role, str) else None
        if build is None:
            raise RequestError(f"{where}: role {role!r} is unknown; expected one of {', '.join(_BUILDERS)}")
        try:
            return build(self, message, where)
        except (TypeError, ValueError) as error:  # recipe's answer to a field of a wrong type or a lone surrogate
            raise RequestError(f"{where}: {error}") from error

    def content(self, message: Message, where: str) -> tuple[str, list[recipe.ImageSource]]:
        """Return the text of a message, a placeholder for each image, and one source per image."""
        content = message.get("content")
        if content is None:
            return "", []
        if isinstance(content, str):
            return content, []
        if not isinstance(content, Sequence) or isinstance(content, bytes):
            raise RequestError(f"{where}: content must be a str or a list of parts, got {type(content).__name__}")
        sources: list[recipe.ImageSource] = []
        pieces = [self._part(part, f"{where}.content[{i}]", sources) for i, part in enumerate(content)]
        if sources and message["role"] not in _IMAGE_ROLES and message["role"] != "developer":
            raise RequestError(f"{where}: a message of role {message['role']!r} cannot hold images")
        return "".join(pieces), sources

    def _part(self, part: object, where: str, sources: list[recipe.ImageSource]) -> str:
        if not isinstance(part, Mapping):
            raise RequestError(f"{where}: expected a dict with a type, got {type(part).__name__}")
        kind = part.get("type")
        if kind == "text" and isinstance(part.get("text"), str):
            return str(part["text"])
        if kind in ("image", "image_url"):
            sources.append(recipe.BytesImageSource(b"", path=str(len(self.images))))
            self.images.append(_image_of(part, where))
            return self.placeholder
        raise RequestError(
            f"{where}: expected {{'type': 'text', 'text': str}}, {{'type': 'image_url', 'image_url': {{'url': str}}}} "
            f"or {{'type': 'image', 'image': path, bytes or PIL image}}, got type {kind!r}"
        )


def read_tool(tool: object, where: str) -> recipe.ToolDefinition:
    """Return the recipe form of `{"type": "function", "function": {"name", "description", "parameters"}}`."""
    function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise RequestError(f"{where}: expected {{'type': 'function', 'function': {{'name': str, 'parameters': dict}}}}")
    parameters = function.get("parameters", {"type": "object", "properties": {}})
    if not isinstance(parameters, Mapping):
        raise RequestError(f"{where}: parameters must be a JSON schema object, got {type(parameters).__name__}")
    try:
        return recipe.ToolDefinition(function["name"], function.get("description"), dict(parameters))
    except (TypeError, ValueError) as error:
        raise RequestError(f"{where}: {error}") from error


def _system(reader: MessageReader, message: Message, where: str) -> recipe.Message:
    text, sources = reader.content(message, where)
    return recipe.SystemMessage(text, sources, image_token=reader.placeholder)


def _user(reader: MessageReader, message: Message, where: str) -> recipe.Message:
    text, sources = reader.content(message, where)
    return recipe.UserMessage(text, sources, image_token=reader.placeholder)


def _tool(reader: MessageReader, message: Message, where: str) -> recipe.Message:
    text, sources = reader.content(message, where)
    return recipe.ToolMessage(text, message.get("tool_call_id"), sources, image_token=reader.placeholder)


def _reminder(reader: MessageReader, message: Message, where: str) -> recipe.Message:
    return recipe.LatestReminderMessage(reader.content(message, where)[0])


def _assistant(reader: MessageReader, message: Message, where: str) -> recipe.Message:
    text = reader.content(message, where)[0]
    calls = [_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(message.get("tool_calls") or [])]
    return recipe.AssistantMessage(text, message.get("reasoning_content"), calls or None, bool(message.get("prefix")))


def _call(call: object, where: str) -> recipe.ToolCall:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or "name" not in function:
        raise RequestError(f"{where}: expected {{'id': str, 'function': {{'name': str, 'arguments': str}}}}")
    arguments = function.get("arguments", "{}")
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return recipe.ToolCall(call.get("id", ""), function["name"], arguments)


_BUILDERS: dict[str, Callable[[MessageReader, Message, str], recipe.Message]] = {
    "system": _system,
    "developer": _system,
    "user": _user,
    "assistant": _assistant,
    "tool": _tool,
    "latest_reminder": _reminder,
}


def _image_of(part: Mapping[str, Any], where: str) -> ImageLike:
    image = part.get(part["type"])
    if isinstance(image, Mapping):
        image = image.get("url")
    if not isinstance(image, str | Path | bytes | Image.Image):
        raise RequestError(f"{where}: an image must be a path, a data URL, bytes or a PIL image, got {image!r:.60}")
    return image


def _texts(message: Message) -> list[str]:
    """Every text that a placeholder could be confused with: those that may stand in one message with images."""
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str | bytes):
        return [part["text"] for part in content if isinstance(part, Mapping) and isinstance(part.get("text"), str)]
    return []


def _unused_spelling(texts: Sequence[str]) -> str:
    """Return a spelling that no text contains. Only its first character is `<`, so no two of it can overlap."""
    number = 0
    while any(f"<image {number}>" in text for text in texts):
        number += 1
    return f"<image {number}>"
