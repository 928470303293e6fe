"""English prose from Debian's documentation packages: download, clean, remove repeats, hold out one document in 80.

Writes train.txt and heldout.txt (documents separated by a form feed) and manifest.json into the output directory.
Packages are downloaded with `apt-get download` and unpacked, never installed.
"""

import argparse
import hashlib
import json
import re
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from train.html_text import Block
from train.readers import read_documents
from train.sources import SOURCES, Source

SEPARATOR = "\n\f\n"
HELD_OUT_ONE_IN = 80
LONGEST_DOCUMENT = 24_000
SHORTEST_DOCUMENT = 400
SHORTEST_PARAGRAPH = 40
NOT_LETTERS = re.compile(r"[^a-z]+")
# Function words that English prose can hardly avoid in forty letters; lists of names and other languages lack them.
ENGLISH = re.compile(
    r"\b(the|a|an|of|to|is|are|and|or|in|for|that|this|it|you|be|with|not|as|by|on|if|was|he|she|i)\b", re.I
)


@dataclass(frozen=True)
class PackageReport:
    """One line of the manifest: what was taken from a package."""

    package: str
    version: str
    licence: str
    documents: int
    bytes: int


def is_prose(text: str) -> bool:
    """Whether a paragraph reads as English prose: mostly letters, ASCII, with a function word."""
    if len(text) < SHORTEST_PARAGRAPH:
        return False
    letters = sum(map(str.isalpha, text)) + text.count(" ")
    words = text.count(" ") + 1
    ascii_only = sum(map(str.isascii, text))
    return (
        letters >= 0.8 * len(text)
        and ascii_only >= 0.98 * len(text)
        and len(text) < 14 * words
        and len(ENGLISH.findall(text)) >= 0.1 * words
    )


def clean(blocks: Iterable[Block], seen: set[bytes]) -> list[str]:
    """Paragraphs worth keeping: prose not met before (letters compared only), with the heading before each.

    Mutates `seen`, the digests of all paragraphs kept so far.
    """
    kept: list[str] = []
    heading = ""
    for block in blocks:
        if block.heading:
            heading = block.text if 3 <= len(block.text) <= 100 and block.text.isascii() else ""
            continue
        if not is_prose(block.text):
            continue
        digest = hashlib.blake2b(NOT_LETTERS.sub("", block.text.lower()).encode(), digest_size=10).digest()
        if digest in seen:
            continue
        seen.add(digest)
        if heading:
            kept.append(heading)
            heading = ""
        kept.append(block.text)
    return kept


def documents(paragraphs: list[str]) -> Iterator[str]:
    """Join paragraphs into documents of at most about LONGEST_DOCUMENT characters; short rests are dropped."""
    piece: list[str] = []
    for paragraph in paragraphs:
        piece.append(paragraph)
        if sum(map(len, piece)) >= LONGEST_DOCUMENT:
            yield "\n\n".join(piece)
            piece = []
    if sum(map(len, piece)) >= SHORTEST_DOCUMENT:
        yield "\n\n".join(piece)


def is_held_out(document: str) -> bool:
    """Split by a hash of the text, so that it depends on nothing else."""
    return int.from_bytes(hashlib.blake2b(document.encode(), digest_size=8).digest()) % HELD_OUT_ONE_IN == 0


def fetch(source: Source, work: Path) -> tuple[Path, str]:
    """Download and unpack one package below `work` unless it is there; returns its root and its version."""
    work.mkdir(parents=True, exist_ok=True)
    if not list(work.glob(f"{source.package}_*.deb")):
        subprocess.run(["apt-get", "download", source.package], cwd=work, check=True, capture_output=True)
    archive = sorted(work.glob(f"{source.package}_*.deb"))[0]
    root = work / "roots" / source.package
    if not root.is_dir():
        root.parent.mkdir(exist_ok=True)
        subprocess.run(["dpkg", "-x", str(archive), str(root)], check=True)
    return root, archive.name.split("_")[1].replace("%3a", ":")


def collect(source: Source, root: Path, seen: set[bytes]) -> list[str]:
    """All documents of one package up to its limit in bytes."""
    found: list[str] = []
    size = 0
    for blocks in read_documents(source, root):
        for document in documents(clean(blocks, seen)):
            found.append(document)
            size += len(document.encode())
        if size >= source.limit:
            break
    return found


def build(work: Path, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    seen: set[bytes] = set()
    reports: list[PackageReport] = []
    split: dict[bool, list[str]] = {False: [], True: []}
    origin: list[str] = []
    for source in SOURCES:
        root, version = fetch(source, work)
        found = collect(source, root, seen)
        size = sum(len(document.encode()) for document in found)
        reports.append(PackageReport(source.package, version, source.licence, len(found), size))
        print(f"{source.package:26}{len(found):6} documents{size / 1e6:8.2f} MB", flush=True)
        for document in found:
            held_out = is_held_out(document)
            split[held_out].append(document)
            if held_out:
                origin.append(source.package)
    (out / "train.txt").write_text(SEPARATOR.join(split[False]), "utf-8")
    (out / "heldout.txt").write_text(SEPARATOR.join(split[True]), "utf-8")
    manifest = {"packages": [asdict(report) for report in reports], "held_out_origin": origin}
    (out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", "utf-8")
    for name in ("train.txt", "heldout.txt"):
        print(f"{name}: {(out / name).stat().st_size / 1e6:.2f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="directory for downloads, outside the repository")
    parser.add_argument("--out", type=Path, default=Path("train/data"))
    arguments = parser.parse_args()
    build(arguments.work, arguments.out)


if __name__ == "__main__":
    main()
