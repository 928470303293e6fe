"""Numbers of bytes, as people write and read them."""

import argparse
import re

_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgtp]?)(i?)b?", re.IGNORECASE)
_TAKES = "takes a number of bytes such as 24GiB, 80GB or 1073741824"


def parse_bytes(text: str) -> int:
    """Bytes of "24GiB" (powers of 1024), "80GB" (powers of 1000) or a plain number; an argparse type."""
    found = _AMOUNT.fullmatch(text.strip())
    if found is None or (found[3] and not found[2]):
        raise argparse.ArgumentTypeError(f"{_TAKES}, not {text!r}")
    return int(float(found[1]) * (1024 if found[3] else 1000) ** _POWERS[found[2].lower()])


def parse_positive(text: str) -> int:
    """An integer of at least 1; an argparse type."""
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"takes an integer of at least 1, not {text!r}")
    return int(text)


def parse_count(text: str) -> int:
    """An integer of at least 0; an argparse type."""
    return 0 if text == "0" else parse_positive(text)


def show_bytes(amount: int) -> str:
    """Three figures and a binary unit: "1.46 GiB"; below 1 KiB exact."""
    size, units = float(amount), ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while abs(size) >= 999.5 and len(units) > 1:
        size, units = size / 1024, units[1:]
    if units[0] == "B":
        return f"{amount} B"
    digits = 2 if abs(size) < 9.995 else 1 if abs(size) < 99.95 else 0
    return f"{size:.{digits}f} {units[0]}"
