"""Stop strings, found in the text as it comes, wherever the borders of tokens and characters lie."""

from collections.abc import Callable

from deepinfer.core.request import Request
from deepinfer.text.reply import Opening
from deepinfer.text.spellings import END_THINK
from deepinfer.text.tokenizer import StreamDecoder, Tokenizer

StopStringsOf = Callable[[Request], "StopStrings | None"]
"""Makes the stop strings of a request; None where it has none."""


class StopStrings:
    """Watches one request's text for the first stop string to become complete.

    Which one that is depends on the text alone: of those that end with the same character the longest counts.
    """

    def __init__(self, stops: tuple[str, ...], stream: StreamDecoder, opening: int | None = None) -> None:
        """With `opening`, the text begins behind the first token with this id: stops inside reasoning do not count."""
        self.matched: str | None = None
        self._stops = stops
        self._stream = stream
        self._opening = opening
        self._pieces: list[str] = []
        self._recent = ""  # the end of the text, as much as a stop string may begin in
        self._overlap = max(map(len, stops)) - 1
        self._after = 0  # characters behind the stop string

    @property
    def text(self) -> str:
        """The text before the stop string; without one all text so far, whose end may yet begin one."""
        return self._split()[0]

    @property
    def tail(self) -> str:
        """The text from the stop string's beginning on, as far as it came; empty without one."""
        return self._split()[1]

    def push(self, token: int, searched: bool) -> bool:
        """Take the next token; whether a stop string became complete. Without `searched` none counts."""
        if self._opening is not None:
            if token == self._opening:
                self._opening = None
            return False
        piece = self._stream.push(token)
        self._pieces.append(piece)
        window = self._recent + piece
        if searched and piece and self._search(window, len(self._recent)):
            return True
        self._recent = window[max(0, len(window) - self._overlap) :]
        return False

    def _search(self, window: str, done: int) -> bool:
        """Look for a stop string that ends behind the first `done` characters of the newest text."""
        found = []
        for stop in self._stops:
            start = window.find(stop, max(0, done - len(stop) + 1))
            if start >= 0:
                found.append((start + len(stop), -len(stop), stop))
        if not found:
            return False
        end, _, self.matched = min(found)
        self._after = len(window) - end
        return True

    def _split(self) -> tuple[str, str]:
        text = "".join(self._pieces)
        begin = len(text) if self.matched is None else len(text) - self._after - len(self.matched)
        return text[:begin], text[begin:]


def stop_strings_of(tokenizer: Tokenizer) -> StopStringsOf:
    """Make stop strings for requests of one vocabulary."""
    thinking = (Opening.REASONING, Opening.CONTINUED_REASONING)

    def make(request: Request) -> StopStrings | None:
        if not request.params.stop:
            return None
        thinks = request.reply is not None and request.reply.opening in thinking
        opening = tokenizer.token_id(END_THINK) if thinks else None
        return StopStrings(tuple(request.params.stop), tokenizer.stream(), opening)

    return make
