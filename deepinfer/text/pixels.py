"""Decodes the images of a request to upright RGB; whatever is wrong with one is one RequestError."""

import io
import struct
from threading import Lock

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from deepinfer.core.errors import RequestError
from deepinfer.text.fetch import Fetcher
from deepinfer.text.sources import ImageLike, ImageLimits, read_source

# Not all that Pillow opens: some of its formats start other programs (EPS) or are known to no user.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "ICO", "TGA", "JPEG2000")
MAX_SCANS = 256  # of a progressive JPEG; real ones have about ten, and each costs a pass over all pixels

_DEFAULT = ImageLimits()
_PNG = b"\x89PNG\r\n\x1a\n"
_given = Lock()  # a PIL image may be in several requests at once, and reads its file when it is first looked at


def load_image(source: ImageLike, limits: ImageLimits = _DEFAULT) -> Image.Image:
    """Return the first frame of an image as upright RGB, alpha composed over white.

    `source` is a path, a data URL, a URL whose host the limits list, the bytes of an image file, or a PIL image, which
    is left as it is. RequestError if it is none of these, cannot be read whole, has no pixels, or breaks a limit.
    """
    if isinstance(source, Image.Image):
        with _given:
            return _decode(source, "PIL image", limits)
    file = read_source(source, limits, Fetcher(limits.url_hosts, limits.max_bytes, limits.url_seconds))
    _check_hidden_work(file.data, file.where, limits)
    try:
        image = Image.open(io.BytesIO(file.data), formats=FORMATS)
    except Exception as error:  # Pillow's plugins raise many types on broken files
        reason = "" if isinstance(error, UnidentifiedImageError) else f": {error}"
        raise RequestError(f"{file.where} is not a readable image ({', '.join(FORMATS)}){reason}") from error
    with image:
        return _decode(image, file.where, limits)


def _check_hidden_work(data: bytes, where: str, limits: ImageLimits) -> None:
    """Refuse what its size does not show: an icon that hides a large PNG, a JPEG with a great many scans."""
    if data[:4] == b"\0\0\1\0":
        entries = min(int.from_bytes(data[4:6], "little"), (len(data) - 6) // 16)
        for offset in (struct.unpack_from("<I", data, 18 + 16 * entry)[0] for entry in range(entries)):
            if data[offset : offset + 8] == _PNG and offset + 24 <= len(data):
                width, height = struct.unpack_from(">II", data, offset + 16)
                _check_size(width, height, where, limits)
    if data[:2] == b"\xff\xd8" and data.count(b"\xff\xda") > MAX_SCANS:
        raise RequestError(f"{where} is a JPEG with more than {MAX_SCANS} scans; save it as an ordinary one")


def _check_size(width: int, height: int, where: str, limits: ImageLimits) -> None:
    if width < 1 or height < 1 or width * height > limits.max_pixels:
        raise RequestError(
            f"{where} has {width} x {height} pixels; expected at least 1 and at most {limits.max_pixels} "
            "(max_image_pixels)"
        )


def _decode(image: Image.Image, where: str, limits: ImageLimits) -> Image.Image:
    _check_size(image.width, image.height, where, limits)
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
