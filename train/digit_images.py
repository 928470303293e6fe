"""Pictures of numbers, drawn with Pillow's built-in font so that every machine draws the same kind."""

import random
from functools import lru_cache

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from train.sample import Sample, Split, belongs

SIZES = ((96, 32), (96, 32), (64, 32), (128, 32), (80, 40), (128, 48), (160, 48))
QUESTIONS = (
    "What number is in the image?",
    "Which number do you see?",
    "Read the number in this picture.",
    "What number is this?",
    "Please read the digits.",
)


@lru_cache(maxsize=64)
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size=size)


def _colours(rng: random.Random) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Background and ink: one dark, one light, at least 100 grey levels apart in every channel."""
    dark = tuple(rng.randint(0, 70) for _ in range(3))
    light = tuple(rng.randint(170, 255) for _ in range(3))
    return (light, dark) if rng.random() < 0.6 else (dark, light)  # type: ignore[return-value]


def _largest_font(text: str, width: int, height: int) -> int:
    """The largest font size whose text fits a picture with a margin for rotation."""
    size = height
    while size > 8:
        left, top, right, bottom = _font(size).getbbox(text)
        if right - left <= 0.92 * width and bottom - top <= 0.8 * height:
            break
        size -= 1
    return size


def draw_number(rng: random.Random, text: str, width: int, height: int) -> Image.Image:
    """Draw digits of 14 pixels and more (where the picture allows) in some size, place, colour, tilt and noise."""
    background, ink = _colours(rng)
    largest = _largest_font(text, width, height)
    font = _font(rng.randint(min(21, largest), largest))
    left, top, right, bottom = font.getbbox(text)
    x = rng.uniform(0.04 * width, max(0.04 * width, 0.96 * width - (right - left))) - left
    y = rng.uniform(0.08 * height, max(0.08 * height, 0.92 * height - (bottom - top))) - top
    image = Image.new("RGB", (width, height), background)
    ImageDraw.Draw(image).text((x, y), text, font=font, fill=ink)
    tilt = rng.uniform(-4, 4)
    image = image.rotate(tilt, resample=Image.Resampling.BILINEAR, fillcolor=background)
    noise = np.random.default_rng(rng.getrandbits(32)).normal(0, rng.uniform(0, 14), (height, width, 3))
    return Image.fromarray(np.clip(np.asarray(image) + noise, 0, 255).astype(np.uint8))


def _number(rng: random.Random, split: Split) -> str:
    """Digits of a number of one to four digits; those of three and four are split between training and evaluation."""
    digits = rng.randint(1, 4)
    while True:
        number = str(rng.randint(10 ** (digits - 1) if digits > 1 else 0, 10**digits - 1))
        if digits < 3 or belongs(f"image {number}", split):
            return number


def make_image(rng: random.Random, split: Split, sizes: tuple[tuple[int, int], ...] = SIZES) -> Sample:
    """A number of one to four digits in a picture of one of `sizes` (width, height); the answer is its digits."""
    number = _number(rng, split)
    image = draw_number(rng, number, *rng.choice(sizes))
    parts = [{"type": "image", "image": image}, {"type": "text", "text": rng.choice(QUESTIONS)}]
    return Sample("image", [{"role": "user", "content": parts}], False, number, number, images=(image,))
