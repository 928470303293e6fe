"""Opens the images of a request as upright RGB; whatever is wrong with one is one RequestError."""

import base64
import binascii
import io
import urllib.parse
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from deepinfer.core.errors import RequestError

# Pillow warns above this and refuses at twice as much; here the first is refused already.
MAX_PIXELS = 89_478_485
# Not all that Pillow opens: some of its formats start other programs (EPS) or are known to no user.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "ICO", "TGA", "JPEG2000")


def load_image(source: str | Path | bytes | Image.Image) -> Image.Image:
    """Return the first frame of an image as upright RGB, alpha composed over white.

    `source` is a path, a data URL, the bytes of an image file, or a PIL image. RequestError if it is none of these,
    cannot be read whole, or has no pixels or more than MAX_PIXELS. Nothing is fetched from the network.
    """
    if isinstance(source, Image.Image):
        return _decode(source, "PIL image")
    if isinstance(source, bytes):
        return _open(source, f"image bytes ({len(source)})")
    if isinstance(source, str) and source[:5].lower() == "data:":
        return _open(_data_url(source), f"data URL {source[:40]}...")
    if isinstance(source, str) and "://" in source:
        raise RequestError(f"image {source[:80]!r}: URLs are not fetched; give a path, a data URL or bytes")
    if not isinstance(source, str | Path):
        raise RequestError(f"an image must be a path, a data URL, bytes or a PIL image, got {type(source).__name__}")
    try:
        data = Path(source).read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        raise RequestError(f"image {str(source)[:200]!r} cannot be read: {error}") from error
    return _open(data, str(source))


def _data_url(url: str) -> bytes:
    head, comma, body = url.partition(",")
    if not comma:
        raise RequestError(f"data URL {url[:40]!r} has no comma; expected data:image/png;base64,...")
    if not head.lower().endswith(";base64"):
        return urllib.parse.unquote_to_bytes(body)
    try:
        return base64.b64decode("".join(urllib.parse.unquote(body).split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(f"data URL {url[:40]!r} is not base64: {error}") from error


def _open(data: bytes, where: str) -> Image.Image:
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except Exception as error:  # Pillow's plugins raise many types on broken files
        raise RequestError(f"{where} is not a readable image ({', '.join(FORMATS)}): {error}") from error
    with image:
        return _decode(image, where)


def _decode(image: Image.Image, where: str) -> Image.Image:
    if image.width < 1 or image.height < 1 or image.width * image.height > MAX_PIXELS:
        raise RequestError(
            f"{where} has {image.width} x {image.height} pixels; expected at least 1 and at most {MAX_PIXELS}"
        )
    try:
        image.load()
        return _rgb(_upright(image))
    except Exception as error:
        raise RequestError(f"{where} cannot be decoded ({image.format or image.mode}): {error}") from error


def _upright(image: Image.Image) -> Image.Image:
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # broken EXIF beside sound pixels
        return image


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):
        image = _eight_bits(image)
    if not image.has_transparency_data:
        return image.convert("RGB")
    layer = image.convert("RGBA")
    white = Image.new("RGBA", layer.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, layer).convert("RGB")


def _eight_bits(image: Image.Image) -> Image.Image:
    """Scale 16-bit grey (Pillow's modes I;16 and I) to 8 bits."""
    values = np.asarray(image).astype(np.float32)
    return Image.fromarray(np.clip(np.rint(values / 257), 0, 255).astype(np.uint8))
