"""Files of documentation packages, in the forms they come in, to blocks of text."""

import gzip
import html
import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

from train.html_text import Block, html_blocks, tidy
from train.sources import Source

TAG = re.compile(r"<[^>]*>")
POD_MARKUP = re.compile(r"[A-Z]<+\s*([^<>]*?)\s*>+")
BLANK_LINE = re.compile(r"\n[ \t\r]*\n")
R_STRING = struct.Struct(">II")
R_STRING_TYPE = 9


def read_documents(source: Source, root: Path) -> Iterator[list[Block]]:
    """Blocks of every document of one unpacked package, in the order of its globs and of the file names."""
    seen: set[Path] = set()
    for pattern in source.globs:
        for path in sorted(root.glob(pattern)):
            if path.is_file() and path.resolve() not in seen and "changelog" not in path.name.lower():
                seen.add(path.resolve())
                yield from _READERS[source.kind](path)


def _text_of(path: Path) -> str:
    data = path.read_bytes()
    if path.suffix in (".gz", ".dz"):
        data = gzip.decompress(data)
    return data.decode("utf-8", errors="ignore")


def _paragraphs(text: str) -> list[Block]:
    return [Block(tidy(piece), heading=False) for piece in BLANK_LINE.split(text) if piece.strip()]


def _html(path: Path) -> Iterator[list[Block]]:
    yield html_blocks(_text_of(path))


def _plain(path: Path) -> Iterator[list[Block]]:
    yield _paragraphs(_text_of(path))


def _vim(path: Path) -> Iterator[list[Block]]:
    """Vim's help pages are one preformatted listing in HTML; their paragraphs are separated by blank lines."""
    yield _paragraphs(html.unescape(TAG.sub("", _text_of(path))))


def _pod(path: Path) -> Iterator[list[Block]]:
    """Perl's plain old documentation: verbatim paragraphs are indented, commands start with '='."""
    pieces = BLANK_LINE.split(_text_of(path))
    prose = (piece for piece in pieces if piece and piece[0] not in " \t=")
    yield [Block(tidy(POD_MARKUP.sub(r"\1", piece)), heading=False) for piece in prose]


def _dictionary(path: Path) -> Iterator[list[Block]]:
    """A dictd database: an unindented headword, then an indented entry; cross references stand in braces."""
    text = _text_of(path).replace("{", "").replace("}", "")
    yield [Block(block.text.replace(" , ", ", "), heading=False) for block in _paragraphs(text)]


def _r_strings(path: Path) -> Iterator[list[Block]]:
    """An R lazy-load database: each zlib stream is one vector of lines, an empty line between paragraphs."""
    data, at = path.read_bytes(), 0
    while at + 4 < len(data):
        stream = zlib.decompressobj()
        vector = stream.decompress(data[at + 4 :])
        at = len(data) - len(stream.unused_data)
        lines = _r_lines(vector)
        if len(lines) > 1000:
            yield _paragraphs("\n".join(lines))


def _r_lines(vector: bytes) -> list[str]:
    """Strings of a serialised character vector (XDR form): per string a word of flags, a length, the bytes."""
    lines, at = [], vector.find(b"\x00\x04\x00\x09")
    while at >= 0 and at + 8 <= len(vector):
        flags, length = R_STRING.unpack_from(vector, at)
        if flags & 0xFF != R_STRING_TYPE or length > len(vector):
            break
        lines.append(vector[at + 8 : at + 8 + length].decode("utf-8", errors="ignore"))
        at += 8 + length
    return lines


_READERS = {
    "html": _html,
    "text": _plain,
    "vim": _vim,
    "pod": _pod,
    "dictionary": _dictionary,
    "r-strings": _r_strings,
}
