"""Compiles constraints for one vocabulary on threads of its own, each once."""

import re
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deepinfer.core.errors import RequestError
from deepinfer.sampling.grammar.constraint import Constraint
from deepinfer.sampling.grammar.vocabulary import Vocabulary

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar, GrammarCompiler

CACHED = 256
"""Compiled grammars that are kept, the last used ones."""


@dataclass(frozen=True)
class Compiled:
    """A grammar for a vocabulary; matchers of many sequences may share it.

    thinking: int32 [words], the mask of a sequence that has yet to end its thinking. known: int32 [words], of the
    tokens that grammars can take at all: xgrammar complains aloud about others.
    """

    grammar: "CompiledGrammar"
    thinking: Tensor
    known: Tensor


class Compiler:
    """Owns the compiled grammars of one vocabulary; any thread may ask. xgrammar is imported with the first grammar."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._known: OrderedDict[tuple[str, bool], Future[Compiled]] = OrderedDict()
        self._lock = Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._compilers: dict[bool, GrammarCompiler] = {}
        self._masks: dict[bool, Tensor] = {}

    def compile(self, constraint: Constraint) -> "Future[Compiled]":
        """Start compiling, unless that was done before; the result raises RequestError if it cannot be done."""
        key = constraint.ebnf, constraint.markup
        with self._lock:
            if key not in self._known:
                self._pool = self._pool or ThreadPoolExecutor(1, "deepinfer-grammars")
                self._known[key] = self._pool.submit(self._compile, constraint)
            self._known.move_to_end(key)
            while len(self._known) > CACHED:
                self._known.popitem(last=False)
            return self._known[key]

    @cached_property
    def _thinking(self) -> Tensor:
        return self.vocabulary.thinking()

    def _compile(self, constraint: Constraint) -> Compiled:
        """Runs on the pool's one thread; xgrammar uses more of its own."""
        compiler = self._compiler(constraint.markup)
        try:
            grammar = compiler.compile_grammar(constraint.ebnf)
        except Exception as error:  # its errors are of several types, RuntimeError among them
            raise RequestError(f"{constraint.source} does not compile: {_reason(error)}") from error
        self._check_start(grammar, constraint)
        if constraint.markup not in self._masks:
            self._masks[constraint.markup] = self.vocabulary.known(constraint.markup)
        return Compiled(grammar, self._thinking, self._masks[constraint.markup])

    def _compiler(self, markup: bool) -> "GrammarCompiler":
        if markup not in self._compilers:
            try:
                import xgrammar
            except ImportError as error:
                raise RequestError(
                    f"structured output and tool grammars need xgrammar ({error}); install deepinfer[structured], or "
                    "pass neither so_args nor, for a chat with tools, tool_grammar=True"
                ) from error
            info = self.vocabulary.info(markup)
            # The cache here is by content as well; xgrammar's own would keep every grammar for ever.
            self._compilers[markup] = xgrammar.GrammarCompiler(info, cache_enabled=False)
        return self._compilers[markup]

    def _check_start(self, grammar: "CompiledGrammar", constraint: Constraint) -> None:
        """RequestError for a grammar that no token can begin."""
        import xgrammar

        bits = torch.zeros((1, self.vocabulary.words), dtype=torch.int32)
        xgrammar.GrammarMatcher(grammar).fill_next_token_bitmask(bits)
        if not bits.any():
            raise RequestError(f"{constraint.source} matches nothing: no token can come first")


def _reason(error: Exception) -> str:
    """What xgrammar says, without the time and the place in its sources."""
    return re.sub(r"^\[[\d:]+\] \S+?:\d+: ", "", str(error).strip()).split("\n")[0][:300]
