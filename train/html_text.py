"""HTML pages to plain paragraphs: menus, tables, code listings and boilerplate are dropped."""

import re
from dataclasses import dataclass
from html.parser import HTMLParser


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


BLOCKS = _words("p li dd dt div section article blockquote h1 h2 h3 h4 h5 h6 br hr body td")
HEADINGS = frozenset(("h1", "h2", "h3", "h4", "h5", "h6"))
DROPPED = _words("script style nav table pre header footer svg form head button select textarea aside")
# Containers that are menus by their class or id; tags of these kinds are closed reliably in generated pages.
CONTAINERS = _words("div span ul ol dl a p section")
MENU = re.compile(
    r"sidebar|related|(?<![\w-])nav(header|footer|igation|bar)?(?![\w-])|toc\b|footer|headerlink|menu|"
    r"breadcrumb|genindex|anchor|copyright|admonition-title|source-link|search|toggle"
)
MENU_IDS = _words("nav navbar navigation footer header sidebar toc menu search page-header page-footer")
TYPOGRAPHY = str.maketrans(
    {
        **dict.fromkeys("‘’‚‛′`´", "'"),
        **dict.fromkeys("“”„‟″", '"'),
        **dict.fromkeys("‐‑‒–—―−", "-"),
        **dict.fromkeys("\u00a0\u2002\u2003\u2009\u202f", " "),
        **dict.fromkeys("\u00ad\u200b\u200c\u200d\ufeff¶", None),
        "…": "...",
        "→": "->",
    }
)


@dataclass(frozen=True)
class Block:
    """One paragraph, list item or heading of a page."""

    text: str
    heading: bool


def tidy(text: str) -> str:
    """Typographic punctuation to ASCII, and every run of white space to one space."""
    return " ".join(text.translate(TYPOGRAPHY).split())


class _PageParser(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.blocks: list[Block] = []
        self._pieces: list[str] = []
        self._heading = False
        self._skipped_tag = ""
        self._skipped_depth = 0

    def _flush(self) -> None:
        text = tidy("".join(self._pieces))
        self._pieces.clear()
        if text:
            self.blocks.append(Block(text, self._heading))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self._skipped_depth:
            self._skipped_depth += tag == self._skipped_tag
            return
        if tag in DROPPED or (tag in CONTAINERS and _is_menu(attrs)):
            self._skipped_tag, self._skipped_depth = tag, 1
            return
        if tag in BLOCKS:
            self._flush()
            self._heading = tag in HEADINGS

    def handle_endtag(self, tag: str) -> None:
        if self._skipped_depth:
            self._skipped_depth -= tag == self._skipped_tag
            return
        if tag in BLOCKS:
            self._flush()
            self._heading = False

    def handle_data(self, data: str) -> None:
        if not self._skipped_depth:
            self._pieces.append(data)

    def close(self) -> None:
        super().close()
        self._flush()


def _is_menu(attrs: list[tuple[str, str | None]]) -> bool:
    for name, value in attrs:
        if value and (
            (name in ("class", "role") and MENU.search(value.lower())) or (name == "id" and value in MENU_IDS)
        ):
            return True
    return False


def html_blocks(page: str) -> list[Block]:
    """The blocks of one HTML page in reading order."""
    parser = _PageParser()
    parser.feed(page)
    parser.close()
    return parser.blocks
