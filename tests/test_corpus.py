"""Cleaning of documentation pages: what stays, what goes, and the split."""

import gzip
import struct
import zlib
from pathlib import Path

import pytest

from train.corpus import SEPARATOR, clean, collect, documents, is_held_out, is_prose
from train.heldout import excerpt, pick
from train.html_text import Block, html_blocks
from train.readers import read_documents
from train.sources import SOURCES, Source

PARAGRAPH = "The quick brown fox jumps over the lazy dog, and it is happy with that."
OTHER = "A river is a large stream of water that flows to the sea or to a lake."
WRAPPED = OTHER.replace(" that ", "\n  that ")

PAGE = f"""<html><head><title>Menu</title></head><body>
<nav><p>{PARAGRAPH}</p></nav>
<div class="sphinxsidebar"><div><p>Menu text of the page</p></div></div>
<div id="footer">Footer</div>
<h2>A&nbsp;heading<a class="headerlink" href="#x">¶</a></h2>
<p>First “line” —
   and <code>second</code> line.<p>Unclosed
<pre>code = here</pre><table><tr><td>cell</td></tr></table>
<ul><li>One item<li>Two items</ul>
<div class="related-topics-not-closed-inside"><p>gone</p></div>
<section class="wy-nav-content-wrap"><p>Stays here.</p></section>
</body></html>"""


def test_html_keeps_text_and_drops_menus_code_and_tables():
    assert html_blocks(PAGE) == [
        Block("A heading", heading=True),
        Block('First "line" - and second line.', heading=False),
        Block("Unclosed", heading=False),
        Block("One item", heading=False),
        Block("Two items", heading=False),
        Block("Stays here.", heading=False),
    ]


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        (PARAGRAPH, True),
        ("Too short to be worth it.", False),
        ("int main(void) { return 0; } /* 0x00 0x01 0x02 0x03 0x04 */ +++ === ---", False),
        ("Der schnelle braune Fuchs springt über den faulen Hund und freut sich sehr.", False),
        ("alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi", False),
        ("這是一個很長的段落 " * 6 + "the of and is", False),
    ],
)
def test_prose(text, kept):
    assert is_prose(text) is kept


def test_clean_removes_repeats_and_keeps_headings_only_before_text():
    seen: set[bytes] = set()
    heading, lonely = Block("Foxes", heading=True), Block("Nothing here", heading=True)
    blocks = [lonely, heading, Block(PARAGRAPH, False), Block(PARAGRAPH.upper() + " 12", False), Block(OTHER, False)]
    assert clean(blocks, seen) == ["Foxes", PARAGRAPH, OTHER]
    assert clean(blocks, seen) == []


def test_documents_are_bounded_and_short_rests_dropped():
    made = list(documents([PARAGRAPH] * 1000))
    assert len(made) == 3
    assert all(len(document) < 26_000 for document in made)
    assert list(documents([PARAGRAPH])) == []


def test_held_out_is_a_small_share():
    share = sum(is_held_out(f"document {number}") for number in range(8000)) / 8000
    assert 0.005 < share < 0.02


def _write(root: Path, name: str, data: bytes) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("kind", "name", "data"),
    [
        ("html", "a.html", f"<p>{PARAGRAPH}</p><p>{OTHER}".encode()),
        ("text", "a.txt.gz", gzip.compress(f"{PARAGRAPH}\n \n{WRAPPED}".encode())),
        ("vim", "a.html", f"<pre><b>{PARAGRAPH}</b>\n\n{OTHER}</pre>".encode()),
        ("pod", "a.pod", f"=head1 NAME\n\nB<{PARAGRAPH}>\n\n  code\n\n{OTHER}\n".encode()),
        ("dictionary", "a.dict.dz", gzip.compress(f"{PARAGRAPH}\n\n{OTHER.replace('river', '{river}')}".encode())),
    ],
)
def test_readers(tmp_path, kind, name, data):
    _write(tmp_path, name, data)
    (blocks,) = read_documents(Source("p", "free", ("*",), kind), tmp_path)
    assert [block.text for block in blocks] == [PARAGRAPH, OTHER]


def test_r_strings(tmp_path):
    lines = ([PARAGRAPH, "", OTHER[:40], OTHER[40:], ""]) * 250
    vector = b"X\n" + bytes(12) + b"".join(struct.pack(">II", 0x00040009, len(line)) + line.encode() for line in lines)
    stream = struct.pack(">I", len(vector)) + zlib.compress(vector)
    _write(tmp_path, "a.rdb", stream + stream)
    found = list(read_documents(Source("p", "free", ("*.rdb",), "r-strings"), tmp_path))
    assert [len(blocks) for blocks in found] == [500, 500]
    assert found[0][0].text == PARAGRAPH


def test_collect_stops_at_the_limit_and_skips_changelogs(tmp_path):
    for number in range(30):
        paragraphs = (f"<p>{PARAGRAPH} {'x' * number} the {'y' * line} end</p>" for line in range(10))
        _write(tmp_path, f"{number:02}.html", "".join(paragraphs).encode())
    _write(tmp_path, "00changelog.html", f"<p>{OTHER * 9}</p>".encode())
    found = collect(Source("p", "free", ("*.html", "0*.html"), limit=5000), tmp_path, set())
    assert 5000 <= sum(map(len, found)) < 7000
    assert not any(OTHER in document for document in found)


def test_sources_are_distinct_and_licensed():
    names = [source.package for source in SOURCES]
    assert len(set(names)) == len(names) > 30
    assert all(source.licence and source.globs for source in SOURCES)


def test_excerpts_leave_out_training_text():
    document = f"{PARAGRAPH}\n\n{OTHER}\n\n{PARAGRAPH}!"
    assert excerpt(document, 1000, OTHER) == f"{PARAGRAPH}\n\n{PARAGRAPH}!"
    assert excerpt(document, 100, "") == PARAGRAPH


def test_pick_takes_something_of_each_package():
    text = "\n\n".join([PARAGRAPH] * 20)
    picked = pick([text, text, text], ["rust-doc", "sqlite3-doc", "perl-doc"], "", 2000)
    assert len(picked) == 2


def test_bundled_held_out_text_is_clean():
    bundled = (Path(__file__).parents[1] / "eval" / "heldout.txt").read_text("utf-8")
    assert 60_000 <= len(bundled.encode()) <= 100_000
    found = bundled.split(SEPARATOR)
    assert len(found) == len(set(found)) >= 15
    paragraphs = [paragraph for document in found for paragraph in document.split("\n\n") if len(paragraph) > 100]
    assert len(set(paragraphs)) == len(paragraphs)
    assert all(map(is_prose, paragraphs))
