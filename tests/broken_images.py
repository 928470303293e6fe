"""A hundred image files that nobody should have to decode: cut off, damaged, lying about their size, no images."""

import io
import random
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image

FORMS = ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF")


def encoded(image: Image.Image, form: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def noise(side: int, seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8))


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(width: int, height: int, pixels: bytes = b"", *before: bytes, kind: int = 2, depth: int = 8) -> bytes:
    """A PNG that claims a size, whatever is in it."""
    header = struct.pack(">IIBBBBB", width, height, depth, kind, 0, 0, 0)
    body = chunk(b"IDAT", zlib.compress(pixels))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + b"".join(before) + body + chunk(b"IEND", b"")


def bmp(width: int, height: int) -> bytes:
    return b"BM" + struct.pack("<IHHIIiiHHIIiiII", 60, 0, 0, 54, 40, width, height, 1, 24, 0, 0, 0, 0, 0, 0)


def truncated(seed: int, count: int) -> dict[str, bytes]:
    source, made = random.Random(seed), {}
    for number in range(count):
        form = FORMS[number % len(FORMS)]
        data = encoded(noise(40, number), form)
        made[f"{form} cut {number}"] = data[: source.randrange(len(data) * 3 // 4)]
    return made


def oversized() -> dict[str, bytes]:
    made = {f"png {w}x{h}": png(w, h) for w in (20_000, 65_535, 2**31 - 1) for h in (20_000, 10**6, 2**31 - 1)}
    made |= {f"bmp {w}x{h}": bmp(w, h) for w in (30_000, 2**31 - 1) for h in (30_000, -(2**31) + 1)}
    made["a bomb of zeros"] = png(30_000, 30_000, bytes(5_000_000))
    made["gif 65535"] = (
        b"GIF89a"
        + struct.pack("<HHBBB", 65_535, 65_535, 0, 0, 0)
        + b","
        + struct.pack("<HHHHB", 0, 0, 65_535, 65_535, 0)
        + b"\x08\x01\x00\x00;"
    )
    made["ppm"] = b"P6 100000 100000 255\n" + bytes(100)
    made["tga"] = struct.pack("<BBBHHBHHHHBB", 0, 0, 2, 0, 0, 0, 0, 0, 65_535, 65_535, 24, 0)
    hidden = png(12_000, 12_000)
    made["icon"] = b"\0\0\1\0\1\0" + struct.pack("<BBBBHHII", 16, 16, 0, 0, 1, 32, len(hidden), 22) + hidden
    text = chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(200_000_000 // 8)))
    made["a bomb in a text chunk"] = png(8, 8, bytes(200), *[text] * 8)
    made["too elongated to be resized"] = png(50_000_000, 1)
    return made


def empty_or_other() -> dict[str, bytes]:
    made = {"empty": b"", "png 0x0": png(0, 0), "png 0x9": png(0, 9), "png 9x0": png(9, 0), "bmp 0x0": bmp(0, 0)}
    made |= {f"first bytes of {form}": encoded(noise(8, 1), form)[:10] for form in FORMS}
    others = [
        "plain text",
        "<svg xmlns='http://www.w3.org/2000/svg'/>",
        "%PDF-1.7\n%%EOF",
        "%!PS-Adobe-3.0 EPSF-3.0\n",
        "{}",
    ]
    others += [
        "<html></html>",
        "#!/bin/sh\nrm -rf /\n",
        "\x7fELF\x02\x01\x01",
        "PK\x03\x04",
        "RIFF\0\0\0\0WEBP",
        "MZ",
        "\0" * 500,
    ]
    made |= {f"other {number}": text.encode("latin-1") for number, text in enumerate(others)}
    made |= {"pdf": encoded(noise(8, 1), "PDF"), "eps": encoded(noise(8, 1), "EPS")}
    scan = encoded(noise(16, 3), "JPEG", progressive=True)
    at = scan.index(b"\xff\xda")
    made["endless scans"] = scan[: at + 30] + scan[at : at + 30] * 400 + scan[at + 30 :]
    return made


def damaged(seed: int) -> dict[str, bytes]:
    """The first half overwritten, but for the magic number."""
    source, made = random.Random(seed), {}
    for number, form in enumerate(FORMS * 2):
        data = encoded(noise(30, number), form)
        made[f"{form} damaged {number}"] = data[:8] + source.randbytes(len(data) // 2) + data[8 + len(data) // 2 :]
    return made


def broken_images() -> dict[str, bytes]:
    """Names and contents, in an order that mixes the kinds."""
    made = {**oversized(), **empty_or_other(), **damaged(1)}
    made |= truncated(2, 100 - len(made))
    names = sorted(made)
    random.Random(3).shuffle(names)
    return {name: made[name] for name in names}
