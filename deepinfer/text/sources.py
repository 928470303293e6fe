"""Where the images of a request come from, and how much of one is taken in."""

import base64
import binascii
import os
import stat
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from deepinfer.core.errors import RequestError

ImageLike = str | Path | bytes | Image.Image
TAKES = "a path, a data URL, bytes or a PIL image"


@dataclass(frozen=True)
class ImageLimits:
    """What is refused before it costs much.

    max_images: of one request. max_bytes: of one image file. max_pixels: width times height, checked before any pixel
    is decoded. (Pillow, which decodes, warns above its own bound, the default here, and refuses twice as much.)
    url_hosts: hosts that images may be fetched from, `name` or `name:port`. url_seconds: most time for one of them.
    """

    max_images: int = 64
    max_bytes: int = 64 << 20
    max_pixels: int = 89_478_485
    url_hosts: tuple[str, ...] = ()
    url_seconds: float = 10.0


@dataclass(frozen=True)
class ImageFile:
    """The bytes of an image file, and what to call it in errors."""

    data: bytes
    where: str


def read_source(source: object, limits: ImageLimits, fetch: Callable[[str], bytes]) -> ImageFile:
    """The file behind a path, a data URL, a URL (which `fetch` gets) or bytes.

    RequestError if it is none of these, cannot be read, or has more bytes than the limit.
    """
    if isinstance(source, bytes):
        return _checked(source, f"image bytes ({len(source)})", limits)
    if isinstance(source, str) and source[:5].lower() == "data:":
        return _checked(_data_url(source, limits), f"data URL {source[:40]}...", limits)
    if isinstance(source, str) and "://" in source[:32]:
        return _checked(fetch(source), source[:80], limits)
    if not isinstance(source, str | Path):
        raise RequestError(f"an image must be {TAKES}, got {type(source).__name__}")
    return _checked(_read(source, limits.max_bytes), str(source), limits)


def _checked(data: bytes, where: str, limits: ImageLimits) -> ImageFile:
    if len(data) > limits.max_bytes:
        raise _too_long(where, limits)
    return ImageFile(data, where)


def _too_long(where: str, limits: ImageLimits) -> RequestError:
    return RequestError(f"{where} has more than {limits.max_bytes} bytes; max_image_bytes takes no more")


def _read(path: str | Path, most: int) -> bytes:
    """Up to one byte more than `most` of a regular file; pipes and devices, which may never end, are not opened."""
    shown = repr(str(path)[:200])
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise RequestError(f"image {shown} cannot be read: it is no file")
        with Path(path).open("rb") as file:
            return file.read(most + 1)
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        raise RequestError(f"image {shown} cannot be read: {error}") from error


def _data_url(url: str, limits: ImageLimits) -> bytes:
    head, comma, body = url.partition(",")
    if not comma:
        raise RequestError(f"data URL {url[:40]!r} has no comma; expected data:image/png;base64,...")
    if len(body) > 4 * limits.max_bytes:  # neither base64 nor percent signs blow bytes up more than three times
        raise _too_long(f"data URL {url[:40]}...", limits)
    if not head.lower().endswith(";base64"):
        return urllib.parse.unquote_to_bytes(body)
    try:
        return base64.b64decode("".join(urllib.parse.unquote(body).split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(f"data URL {url[:40]!r} is not base64: {error}") from error
