"""The grammar that one request carries, and who gives it one."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from deepinfer.core.errors import RequestError
from deepinfer.core.sampling_params import SamplingParams
from deepinfer.sampling.grammar.compiler import Compiled, Compiler
from deepinfer.sampling.grammar.constraint import Constraint, declared_tools, structured_output
from deepinfer.sampling.grammar.matcher import Matcher
from deepinfer.text.reply import Opening, ReplyFormat


@dataclass(frozen=True)
class RequestGrammar:
    """A grammar that is compiled or being compiled.

    constraint: what it was made from. end_thinking: the token after which it holds; None: from the first on.
    """

    compiling: "Future[Compiled]"
    constraint: Constraint
    end_thinking: int | None = None

    @property
    def unenforced(self) -> tuple[str, ...]:
        """JSON paths of what was asked for and is not enforced."""
        return self.constraint.unenforced

    def wait(self) -> None:
        """Return when it is compiled; RequestError if it cannot be."""
        self.compiling.result()

    def matcher(self) -> Matcher:
        """A matcher for one sequence."""
        return Matcher(self.compiling.result(), self.end_thinking)


class GrammarDesk:
    """Decides what a request is held to and starts compiling it; RequestError for what cannot be."""

    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler

    def plain(self, params: SamplingParams) -> RequestGrammar | None:
        """What the continuation of a prompt is held to."""
        return None if params.so_args is None else self.start(self._structured(params), None)

    def reply(
        self, params: SamplingParams, reply: ReplyFormat, tools: Sequence[Mapping[str, Any]] | None
    ) -> RequestGrammar | None:
        """What a reply is held to behind its thinking: `so_args`, else the form and schemas of the tools' calls."""
        thinks = reply.opening in (Opening.REASONING, Opening.CONTINUED_REASONING)
        end_thinking = self._compiler.vocabulary.end_thinking if thinks else None
        if params.so_args is not None:
            return self.start(self._structured(params), end_thinking)
        markup = self._compiler.vocabulary.markup
        if not tools or not reply.tools or markup is None or params.ignore_eos:
            return None
        return self.start(declared_tools(tools, markup, reply.opening is Opening.TOOL_CALLS), end_thinking)

    def _structured(self, params: SamplingParams) -> Constraint:
        if params.ignore_eos:
            raise RequestError(
                "ignore_eos is True; with so_args it takes False: a structured output ends where it must"
            )
        return structured_output(params.so_args or {})

    def start(self, constraint: Constraint, end_thinking: int | None) -> RequestGrammar:
        """Start compiling what holds behind the token `end_thinking` (None: from the first token on)."""
        return RequestGrammar(self._compiler.compile(constraint), constraint, end_thinking)
