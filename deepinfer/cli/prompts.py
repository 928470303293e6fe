"""Where the prompts of a command come from."""

import sys
from collections.abc import Sequence
from pathlib import Path

from deepinfer.core.errors import RequestError

STDIN = "-"
_TAKES = "pass prompts as arguments, --file FILE with one a line, or lines on standard input"


def read_prompts(arguments: Sequence[str], file: str | None) -> list[str]:
    """The arguments, then the lines of `file` (`-`: of standard input); of standard input alone if there is neither.

    Empty lines are left out. RequestError for a file that cannot be read, and where there is no prompt.
    """
    source = STDIN if file is None and not arguments else file
    if source == STDIN and sys.stdin.isatty():
        raise RequestError(f"there is no prompt; {_TAKES}")
    prompts = [*arguments, *([] if source is None else _lines(source))]
    if not prompts:
        raise RequestError(f"{_name(source)} holds no prompt; {_TAKES}")
    return prompts


def _lines(source: str) -> list[str]:
    try:
        text = sys.stdin.read() if source == STDIN else Path(source).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{_name(source)} cannot be read ({error}); it takes UTF-8 text, a prompt a line") from error
    return [line for line in text.splitlines() if line.strip()]


def _name(source: str | None) -> str:
    return "standard input" if source in (None, STDIN) else str(source)
