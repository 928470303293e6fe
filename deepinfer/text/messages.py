"""The images of a chat request, taken out of its messages so that the rest is plain Chat Completions JSON."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from deepinfer.core.errors import RequestError
from deepinfer.text.sources import TAKES, ImageLike

Message = Mapping[str, Any]

_URL = "http://image/"  # never fetched; the number behind it finds the image again


def take_images(messages: Sequence[Message]) -> tuple[list[Message], list[ImageLike]]:
    """Return messages in which every image part is a numbered stand-in URL, and the images by number.

    Image parts are `{"type": "image_url", "image_url": {"url": URL, data URL or path}}` and
    `{"type": "image", "image": path, URL, data URL, bytes or PIL image}`. RequestError names the message and part.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise RequestError("messages must be a non-empty list of dicts with role and content")
    images: list[ImageLike] = []
    return [_message(message, f"messages[{i}]", images) for i, message in enumerate(messages)], images


def image_number(url: str | None) -> int:
    """Return the number of the image that a stand-in URL stands for."""
    return int((url or "").removeprefix(_URL))


def unused_placeholder(messages: Sequence[Message]) -> str:
    """Return a spelling that no text part contains.

    The renderer takes the first occurrences of the placeholder in a message for its images, so one that a user can
    type would let text stand in for an image. Only its first character is `<`, so no two occurrences overlap.
    """
    texts = [text for message in messages for text in _text_parts(message)]
    number = 0
    while any(f"<image {number}>" in text for text in texts):
        number += 1
    return f"<image {number}>"


def _message(message: object, where: str, images: list[ImageLike]) -> Message:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where}: expected a dict with role and content, got {type(message).__name__}")
    role = "system" if message.get("role") == "developer" else message.get("role")
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str | bytes):
        content = [_part(part, f"{where}.content[{i}]", images) for i, part in enumerate(content)]
    return {**message, "role": role, **({"content": content} if "content" in message else {})}


def _part(part: object, where: str, images: list[ImageLike]) -> object:
    if not isinstance(part, Mapping) or part.get("type") not in ("text", "image", "image_url"):
        raise RequestError(
            f"{where}: expected {{'type': 'text', 'text': str}}, {{'type': 'image_url', 'image_url': {{'url': str}}}} "
            f"or {{'type': 'image', 'image': {TAKES}}}, got {part!r:.80}"
        )
    if part["type"] == "text":
        return part
    image = part.get(part["type"])
    if isinstance(image, Mapping):
        image = image.get("url")
    if not isinstance(image, str | Path | bytes | Image.Image):
        raise RequestError(f"{where}: an image must be {TAKES}, got {image!r:.80}")
    images.append(image)
    return {"type": "image_url", "image_url": {"url": f"{_URL}{len(images) - 1}"}}


def _text_parts(message: Message) -> list[str]:
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    return [part["text"] for part in parts if isinstance(part.get("text"), str)]
