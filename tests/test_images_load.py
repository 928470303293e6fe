"""Opening what users send: every source and pixel format ends as upright RGB, every fault as one RequestError."""

import base64
import contextlib
import io
import os
import struct
import urllib.parse
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from broken_images import png
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from deepinfer.core.errors import RequestError
from deepinfer.text.pixels import load_image
from deepinfer.text.sources import ImageLimits

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:PIL"),  # about damaged tags
    pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning"),
]
RED, GREEN, WHITE = (255, 0, 0), (0, 255, 0), (255, 255, 255)


def two_pixels() -> Image.Image:
    image = Image.new("RGB", (2, 1), RED)
    image.putpixel((1, 0), GREEN)
    return image


def encoded(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def noise(width: int, height: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8))


def colours(image: Image.Image) -> list[tuple[int, int, int]]:
    assert image.mode == "RGB"
    return [image.getpixel((x, y)) for y in range(image.height) for x in range(image.width)]


class TestSources:
    def test_all_give_the_same(self, tmp_path: Path) -> None:
        data = encoded(two_pixels())
        path = tmp_path / "image.png"
        path.write_bytes(data)
        base = base64.b64encode(data).decode()
        lines = "\n".join(base[i : i + 20] for i in range(0, len(base), 20))
        sources = [
            path,
            str(path),
            data,
            two_pixels(),
            Image.open(path),
            f"data:image/png;base64,{base}",
            f"DATA:;BASE64,{lines}",
            f"data:image/png;base64,{urllib.parse.quote(base, safe='')}",
            f"data:image/png,{urllib.parse.quote_from_bytes(data)}",
        ]
        for source in sources:
            assert colours(load_image(source)) == [RED, GREEN]

    def test_the_content_decides_not_the_name(self, tmp_path: Path) -> None:
        path = tmp_path / "picture.txt"
        path.write_bytes(encoded(two_pixels(), "BMP"))
        assert colours(load_image(path)) == [RED, GREEN]

    def test_a_given_image_is_not_changed(self) -> None:
        image = Image.new("RGBA", (1, 1), (255, 0, 0, 0))
        assert colours(load_image(image)) == [WHITE]
        assert (image.mode, image.getpixel((0, 0))) == ("RGBA", (255, 0, 0, 0))


class TestPixelFormats:
    @pytest.mark.parametrize("form", ["PNG", "BMP", "GIF", "TIFF", "PPM", "ICO"])
    def test_lossless_files(self, form: str) -> None:
        image = Image.new("RGB", (16, 16), RED)
        image.paste(GREEN, (8, 0, 16, 16))
        assert colours(load_image(encoded(image, form))) == colours(image)

    @pytest.mark.parametrize("form", ["JPEG", "WEBP"])
    @pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
    def test_lossy_files(self, form: str, mode: str) -> None:
        if (form, mode) == ("WEBP", "CMYK"):
            mode = "RGBA"
        image = Image.new("RGB", (16, 16), (200, 200, 200)).convert(mode)
        loaded = np.asarray(load_image(encoded(image, form))).astype(int)
        assert abs(loaded - 200).max() <= 3

    def test_photographs_that_hold_several_pictures(self) -> None:
        grey = Image.new("RGB", (16, 16), (200, 200, 200))
        data = encoded(grey, "MPO", save_all=True, append_images=[Image.new("RGB", (16, 16))])
        assert abs(np.asarray(load_image(data)).astype(int) - 200).max() <= 3

    @pytest.mark.parametrize(("value", "expected"), [(0, 0), (65535, 255), (32896, 128), (257, 1), (128, 0)])
    def test_sixteen_bit_grey_is_scaled(self, value: int, expected: int) -> None:
        image = Image.fromarray(np.full((1, 1), value, dtype=np.uint16))
        assert colours(load_image(encoded(image))) == [(expected,) * 3]
        assert colours(load_image(image)) == [(expected,) * 3]
        assert colours(load_image(Image.fromarray(np.full((1, 1), value, dtype=np.int32)))) == [(expected,) * 3]

    def test_alpha_lies_over_white(self) -> None:
        image = Image.new("RGBA", (3, 1), (0, 0, 0, 0))
        image.putpixel((1, 0), (0, 0, 0, 255))
        image.putpixel((2, 0), (255, 0, 0, 51))
        assert colours(load_image(encoded(image))) == [WHITE, (0, 0, 0), (255, 204, 204)]

    def test_grey_with_alpha(self) -> None:
        assert colours(load_image(encoded(Image.new("LA", (1, 1), (0, 0))))) == [WHITE]

    def test_a_palette_with_a_transparent_colour(self) -> None:
        image = Image.new("P", (2, 1))
        image.putpalette([*RED, *GREEN])
        image.putpixel((1, 0), 1)
        assert colours(load_image(encoded(image))) == [RED, GREEN]
        assert colours(load_image(encoded(image, transparency=0))) == [WHITE, GREEN]

    def test_a_transparent_key_colour(self) -> None:
        assert colours(load_image(encoded(two_pixels(), transparency=RED))) == [WHITE, GREEN]

    @pytest.mark.parametrize(
        ("kind", "pixel"), [(0, "8180"), (2, "8180 ffff 0000"), (4, "8180 ffff"), (6, "8180 ffff 0000 ffff")]
    )
    def test_sixteen_bits_a_channel(self, kind: int, pixel: str) -> None:
        """Grey, colour, and both with alpha."""
        (colour,) = colours(load_image(png(1, 1, b"\0" + bytes.fromhex(pixel), kind=kind, depth=16)))
        assert colour in ([(129, 255, 0), (130, 255, 0)] if kind & 2 else [(129,) * 3, (130,) * 3])

    @pytest.mark.parametrize("form", ["TIFF", "JPEG"])
    def test_inks(self, form: str) -> None:
        """Cyan, magenta, yellow and black: nothing printed is white."""
        image = Image.new("CMYK", (16, 16), (0, 0, 0, 0))
        image.paste((0, 255, 255, 0), (8, 0, 16, 16))
        loaded = load_image(encoded(image, form))
        assert np.abs(np.subtract(loaded.getpixel((2, 2)), WHITE)).max() <= 3
        assert np.abs(np.subtract(loaded.getpixel((13, 2)), RED)).max() <= 3

    def test_black_and_white(self) -> None:
        assert colours(load_image(encoded(Image.new("1", (1, 1), 1)))) == [WHITE]

    def test_the_first_frame_of_an_animation(self) -> None:
        frames = [Image.new("RGB", (4, 4), colour) for colour in (RED, GREEN)]
        for form in ("GIF", "PNG", "WEBP", "TIFF"):
            options = {"lossless": True} if form == "WEBP" else {}
            data = encoded(frames[0], form, save_all=True, append_images=frames[1:], **options)
            assert set(colours(load_image(data))) == {RED}


class TestOrientation:
    @pytest.mark.parametrize(("orientation", "expected"), [(1, [RED, GREEN]), (2, [GREEN, RED]), (3, [GREEN, RED])])
    def test_exif_is_applied(self, orientation: int, expected: list[Any]) -> None:
        exif = Image.Exif()
        exif[0x0112] = orientation
        assert colours(load_image(encoded(two_pixels(), exif=exif))) == expected

    @pytest.mark.parametrize("orientation", range(1, 9))
    def test_every_orientation(self, orientation: int) -> None:
        """A picture stored turned and mirrored in any way comes out as it was."""
        upright = noise(3, 2)
        turn = {
            1: None, 2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180,
            4: Image.Transpose.FLIP_TOP_BOTTOM, 5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_90,
            7: Image.Transpose.TRANSVERSE, 8: Image.Transpose.ROTATE_270,
        }[orientation]  # fmt: skip
        exif = Image.Exif()
        exif[0x0112] = orientation
        stored = upright if turn is None else upright.transpose(turn)
        assert load_image(encoded(stored, exif=exif)).tobytes() == upright.tobytes()

    def test_quarter_turns_swap_the_sides(self) -> None:
        exif = Image.Exif()
        exif[0x0112] = 6
        loaded = load_image(encoded(two_pixels(), exif=exif))
        assert (loaded.size, colours(loaded)) == ((1, 2), [RED, GREEN])

    def test_broken_exif_does_not_cost_the_image(self) -> None:
        data = encoded(two_pixels(), exif=b"Exif\x00\x00MM\x00*\x00\x00\x00\x08\x00\x09garbage")
        assert colours(load_image(data)) == [RED, GREEN]


def png_header(width: int, height: int) -> bytes:
    """Return a PNG that claims a size, with hardly any data behind it."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 99)) + chunk(b"IEND", b"")
    )


CONTENTS = {
    "a.png": b"hello",
    "b.png": b"PK\x03\x04rest",
    "c.svg": b"<svg/>",
    "d.eps": encoded(two_pixels(), "EPS"),  # Pillow would hand it to Ghostscript
    "e.pdf": encoded(two_pixels(), "PDF"),
}


class TestFaults:
    @pytest.mark.parametrize(
        ("source", "message"),
        [
            ("absent/file.png", r"'absent/file\.png' cannot be read"),
            (Path("absent.png"), r"'absent\.png' cannot be read"),
            ("nul\0byte.png", "cannot be read"),
            ("x" * 5000, "cannot be read"),
            (".", "cannot be read"),
            ("http://localhost/x.png", "URLs are not fetched"),
            ("https://localhost/x.png", "URLs are not fetched"),
            ("file:///etc/passwd", "only http:// and https:// URLs"),
            ("data:image/png;base64", "no comma"),
            ("data:image/png;base64,@@@", "not base64"),
            ("data:image/png;base64,AAA", "not base64"),
            ("data:image/png;base64,é", "not base64"),
            ("data:image/png;base64,", "not a readable image"),
            ("data:,hello", "not a readable image"),
            (b"", "not a readable image"),
            (b"not an image", "not a readable image"),
            (None, "got NoneType"),
            (5, "got int"),
            (bytearray(b"x"), "got bytearray"),
        ],
    )
    def test_sources(self, source: Any, message: str) -> None:
        with pytest.raises(RequestError, match=message):
            load_image(source)

    @pytest.mark.parametrize("form", ["PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF"])
    def test_cut_files(self, form: str) -> None:
        data = encoded(noise(40, 40), form)
        with pytest.raises(RequestError, match=r"bytes \(\d+\)"):
            load_image(data[: len(data) // 2])

    @pytest.mark.parametrize("form", ["PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF"])
    @given(data=st.data())
    @settings(max_examples=40, deadline=None)
    def test_damaged_files_load_or_have_one_error(self, form: str, data: st.DataObject) -> None:
        damaged = bytearray(encoded(noise(12, 9), form))
        for _ in range(data.draw(st.integers(1, 4))):
            damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
        with contextlib.suppress(RequestError):
            assert load_image(bytes(damaged)).mode == "RGB"

    @pytest.mark.parametrize("side", [20_000, 60_000, 2**31 - 1])
    def test_bombs(self, side: int) -> None:
        with pytest.raises(RequestError, match=r"pixels|not a readable image"):
            load_image(png_header(side, side))

    def test_the_limit_is_named(self) -> None:
        limits = ImageLimits(max_pixels=8)
        assert load_image(Image.new("RGB", (4, 2)), limits).size == (4, 2)
        message = r"has 3 x 3 pixels; expected at least 1 and at most 8 \(max_image_pixels\)"
        for source in (encoded(Image.new("RGB", (3, 3))), Image.new("RGB", (3, 3))):
            with pytest.raises(RequestError, match=message):
                load_image(source, limits)

    def test_files_are_not_read_beyond_the_limit(self, tmp_path: Path) -> None:
        data, path = encoded(noise(8, 8)), tmp_path / "x.png"
        path.write_bytes(data)
        urls = [
            "data:image/png;base64," + base64.b64encode(data).decode(),
            "data:image/png," + urllib.parse.quote_from_bytes(data),
            "data:image/png;base64," + "A" * 4000,
        ]
        for source in (path, data, *urls):
            with pytest.raises(RequestError, match=r"has more than 200 bytes; max_image_bytes takes no more"):
                load_image(source, ImageLimits(max_bytes=200))
        assert load_image(path, ImageLimits(max_bytes=len(data))).size == (8, 8)

    def test_what_is_no_regular_file_is_not_opened(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")  # opening it would wait for a writer
        for path in (tmp_path / "pipe", "/dev/zero", tmp_path):
            with pytest.raises(RequestError, match="cannot be read: it is no file"):
                load_image(path)

    def test_an_icon_that_hides_a_large_picture(self) -> None:
        inside = png_header(12_000, 12_000)
        entry = struct.pack("<BBBBHHII", 16, 16, 0, 0, 1, 32, len(inside), 22)
        with pytest.raises(RequestError, match="12000 x 12000 pixels"):
            load_image(b"\0\0\1\0\1\0" + entry + inside)

    def test_a_jpeg_of_endless_scans(self) -> None:
        data = encoded(noise(16, 16), "JPEG", progressive=True)
        start = data.index(b"\xff\xda")
        end = data.index(b"\xff", start + 2)
        with pytest.raises(RequestError, match="a JPEG with more than 256 scans"):
            load_image(data[:end] + data[start:end] * 300 + data[end:])

    @pytest.mark.parametrize("size", [(0, 5), (5, 0)])
    def test_no_pixels(self, size: tuple[int, int]) -> None:
        with pytest.raises(RequestError, match=f"{size[0]} x {size[1]} pixels"):
            load_image(Image.new("RGB", size))

    def test_text_and_archives_are_not_images(self, tmp_path: Path) -> None:
        for name, data in CONTENTS.items():
            (tmp_path / name).write_bytes(data)
            with pytest.raises(RequestError, match=f"{name} is not a readable image"):
                load_image(tmp_path / name)

    def test_an_image_that_was_closed(self, tmp_path: Path) -> None:
        path = tmp_path / "x.png"
        path.write_bytes(encoded(two_pixels()))
        with Image.open(path) as image:
            pass
        with pytest.raises(RequestError, match="PIL image cannot be decoded"):
            load_image(image)
