"""Picks the held-out text that travels with the repository, so that the perplexity can be measured offline.

Takes held-out documents of permissively licensed packages, about the same amount of each.
"""

import argparse
import json
from pathlib import Path

from train.corpus import SEPARATOR

PACKAGES = (
    "python3.11-doc",
    "postgresql-doc-15",
    "rust-doc",
    "sqlite3-doc",
    "apache2-doc",
    "python-django-doc",
    "jargon-text",
    "r-cran-janeaustenr",
)
BYTES_A_PACKAGE = 11_000


def excerpt(document: str, limit: int, training: str) -> str:
    """The leading paragraphs of a document, at most `limit` bytes, without those that the training text holds too."""
    kept: list[str] = []
    size = 0
    for paragraph in document.split("\n\n"):
        size += len(paragraph.encode()) + 2
        if size > limit:
            break
        if paragraph not in training:
            kept.append(paragraph)
    return "\n\n".join(kept)


def pick(documents: list[str], origin: list[str], training: str, limit: int = BYTES_A_PACKAGE) -> list[str]:
    """Excerpts of held-out documents, for each of PACKAGES up to `limit` bytes; `origin` names each one's package."""
    picked: list[str] = []
    for package in PACKAGES:
        left = limit
        for document, name in zip(documents, origin, strict=True):
            piece = excerpt(document, min(left, limit // 2), training) if name == package else ""
            if len(piece) > 400:
                picked.append(piece)
                left -= len(piece.encode())
    return picked


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("train/data"))
    parser.add_argument("--out", type=Path, default=Path("eval/heldout.txt"))
    arguments = parser.parse_args()
    documents = (arguments.data / "heldout.txt").read_text("utf-8").split(SEPARATOR)
    origin = json.loads((arguments.data / "manifest.json").read_text("utf-8"))["held_out_origin"]
    training = (arguments.data / "train.txt").read_text("utf-8")
    text = SEPARATOR.join(pick(documents, origin, training))
    arguments.out.write_text(text, "utf-8")
    print(f"{arguments.out}: {len(text.encode())} bytes")


if __name__ == "__main__":
    main()
