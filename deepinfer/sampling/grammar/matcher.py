"""One sequence's place in its grammar."""

from collections.abc import Sequence

import torch
from torch import Tensor

from deepinfer.core.errors import EngineError
from deepinfer.sampling.grammar.compiler import Compiled

ALL = -1
"""A word of a mask that allows its 32 tokens."""


class Matcher:
    """Takes the tokens that a sequence generates and tells which may come next; any number can be taken back.

    If the sequence begins with thinking, the grammar holds from the token after the one that ends it.
    """

    def __init__(self, compiled: Compiled, end_thinking: int | None = None) -> None:
        """`end_thinking`: the token that ends the thinking; None if the grammar holds from the first token on."""
        import xgrammar

        self._machine = xgrammar.GrammarMatcher(compiled.grammar)
        self._thinking, self._known, self._end_thinking = compiled.thinking, compiled.known, end_thinking
        self._tokens: list[int] = []
        self._start = 0 if end_thinking is None else None

    @property
    def length(self) -> int:
        """Tokens taken."""
        return len(self._tokens)

    @property
    def ended(self) -> bool:
        """Whether the end-of-sequence token was taken, after which nothing can come."""
        return bool(self._machine.is_terminated())

    def take(self, token: int) -> None:
        """Take the next token; EngineError, and nothing changes, if the grammar does not allow it."""
        if self._start is not None and (self.ended or not self._machine.accept_token(token)):
            raise EngineError(f"the grammar does not allow token {token} after {self.length} tokens")
        self._tokens.append(token)
        if self._start is None and token == self._end_thinking:
            self._start = self.length

    def rewind(self, length: int) -> None:
        """Take back all but the first `length` tokens; ValueError if there are fewer."""
        if length > self.length:
            raise ValueError(f"{self.length} tokens were taken, {length} are to stay")
        if self._start is not None:
            matched = self.length - self._start
            if matched and length < self.length:
                self._machine.rollback(min(matched, self.length - length))
            if length < self._start:
                self._start = None
        del self._tokens[length:]

    def put(self, place: int, token: int) -> None:
        """Make `token` the one at `place`, taking back what came after if it is another; ValueError beyond the end."""
        if place < self.length and self._tokens[place] == token:
            return
        self.rewind(place)
        self.take(token)

    def fill(self, bits: Tensor) -> None:
        """Write the mask of the next token into `bits`, int32 [1, words] on the host.

        After the end everything is allowed: what is drawn there is not used.
        """
        if self._start is None:
            bits[0] = self._thinking
        elif self.ended:
            bits.fill_(ALL)
        else:
            self._machine.fill_next_token_bitmask(bits)

    def legal(self, drafts: Sequence[int]) -> int:
        """How many of a block's drafts may come, up to the first that may not; the sequence stays where it was.

        To take a token costs far less than to fill the mask that says which may be taken.
        """
        before = self.length
        try:
            for place, draft in enumerate(drafts):
                allowed = self._thinking if self._start is None else self._known
                if not int(allowed[draft // 32]) >> (draft % 32) & 1:
                    return place
                self.take(draft)
            return len(drafts)
        except EngineError:
            return self.length - before
        finally:
            self.rewind(before)

    def walk(self, drafts: Sequence[int], bits: Tensor) -> None:
        """Fill the masks of a block of legal drafts; the sequence stays where it was.

        bits: int32 [1 + len(drafts), words]; row j is the mask after the first j drafts.
        """
        before = self.length
        try:
            self.fill(bits[:1])
            for place, draft in enumerate(drafts, 1):
                self.take(draft)
                self.fill(bits[place : place + 1])
        finally:
            self.rewind(before)


def blank(rows: int, words: int, pinned: bool) -> Tensor:
    """int32 [rows, words] on the host, allowing everything."""
    return torch.full((rows, words), ALL, dtype=torch.int32, pin_memory=pinned)
