"""How the tokens of one request are chosen, and when the request ends."""

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, NoReturn

from deepinfer.core.errors import RequestError

SEED_LIMIT = 2**64
LOGPROBS_LIMIT = 1024
N_LIMIT = 4096
GRAMMARS = ("regex", "json_schema", "ebnf")


@dataclass(frozen=True)
class SamplingParams:
    """Sampling settings of one request; a wrong value raises `RequestError` at construction.

    temperature: 0 takes the most probable token (greedy); a value above 0 divides the logits before the draw.
    max_tokens: most tokens to generate, the stop token included; None: as many as the context has room for.
    stop_token_ids: token ids that end the request, besides the model's end-of-sequence token.
    ignore_eos: go on after the end-of-sequence token (for measurements).
    seq_seed: seed of this sequence's draws, 0 .. 2^64 - 1; None takes a fresh one from the operating system. The output
        says which it was. The same seed, prompt and model give the same draws whatever else is in the batch.
    top_p: draw from the fewest most probable tokens that have at least this probability together; 1: from all.
    top_k: draw from that many most probable tokens; 0: from all.
    min_p: draw from tokens at least this times as probable as the most probable one; 0: from all.
    min_tokens: no stop token and no stop string ends the request before that many tokens.
    stop: strings that end the request; the text returned ends before the first of them.
    presence_penalty: taken once from the logit of every token that was generated before.
    frequency_penalty: taken from the logit of every token for each time that it was generated before.
    repetition_penalty: divides the positive and multiplies the negative logits of tokens that the prompt holds or that
        were generated before; 1: neither.
    logit_bias: token id -> what is added to its logit; -inf: never this token.
    logprobs: return the log-probability of each generated token, and of that many most probable ones; None: of none.
    prompt_logprobs: the same of each token of the prompt. Such a request runs all of the model over all of its prompt:
        it makes no use of cached prefixes and of bounded replay.
    n: completions of the prompt, each with a seed of its own.
    so_args: form of the output: exactly one of regex (str), json_schema (str, mapping or bool) and ebnf (str); and, if
        what a schema asks for cannot be enforced in full and need not be, `"partial": True`.
    """

    temperature: float = 1.0
    max_tokens: int | None = 256
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    seq_seed: int | None = None
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    so_args: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        self._check_draw()
        self._check_penalties()
        self._check_end()
        self._check_report()
        if self.so_args is not None:
            _check_so_args(self.so_args)
            self._freeze("so_args", deepcopy(dict(self.so_args)))

    @property
    def penalises(self) -> bool:
        """Whether the tokens before a draw change its logits."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    def _check_draw(self) -> None:
        temperature = "a finite number >= 0 (0: greedy)"
        _take("temperature", self.temperature, _is_finite(self.temperature) and self.temperature >= 0, temperature)
        for name in ("top_p", "min_p"):
            value = getattr(self, name)
            _take(name, value, _is_finite(value) and 0 <= value <= 1, "a number from 0 to 1")
        _take("top_k", self.top_k, _is_count(self.top_k), "a whole number >= 0 (0: all tokens)")
        seed = self.seq_seed is None or (_is_count(self.seq_seed) and self.seq_seed < SEED_LIMIT)
        _take("seq_seed", self.seq_seed, seed, "a whole number from 0 to 2^64 - 1, or None for a fresh seed")
        _take("n", self.n, _is_count(self.n) and 1 <= self.n <= N_LIMIT, f"a whole number from 1 to {N_LIMIT}")

    def _check_penalties(self) -> None:
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _take(name, value, _is_finite(value) and -2 <= value <= 2, "a number from -2 to 2 (0: none)")
        value = self.repetition_penalty
        _take(
            "repetition_penalty",
            value,
            _is_finite(value) and 0.01 <= value <= 100,
            "a number from 0.01 to 100 (1: none)",
        )
        if self.logit_bias is not None:
            bias = self.logit_bias
            good = isinstance(bias, Mapping) and all(map(_is_count, bias)) and all(map(_is_bias, bias.values()))
            _take(
                "logit_bias", bias, good, "a mapping from token ids to numbers of at most 1e9 (or -inf: never), or None"
            )
            self._freeze("logit_bias", dict(bias))

    def _check_end(self) -> None:
        limit = "a whole number >= 1, or None for all the context has room for"
        _take("max_tokens", self.max_tokens, self.max_tokens is None or _is_positive(self.max_tokens), limit)
        _take("min_tokens", self.min_tokens, _is_count(self.min_tokens), "a whole number >= 0")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            _refuse("min_tokens", self.min_tokens, f"a whole number up to max_tokens, which is {self.max_tokens}")
        _take("ignore_eos", self.ignore_eos, isinstance(self.ignore_eos, bool), "True or False")
        ids = self.stop_token_ids
        _take("stop_token_ids", ids, _is_list(ids) and all(map(_is_count, ids)), "a list of token ids, each >= 0")
        self._freeze("stop_token_ids", tuple(ids))
        stops = [self.stop] if isinstance(self.stop, str) else self.stop
        good = _is_list(stops) and all(isinstance(stop, str) and stop for stop in stops)
        _take("stop", self.stop, good, "a string or a list of strings, none of them empty")
        self._freeze("stop", tuple(stops))

    def _check_report(self) -> None:
        accepted = f"a whole number from 0 to {LOGPROBS_LIMIT}, or None for no log-probabilities"
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _take(name, value, value is None or (_is_count(value) and value <= LOGPROBS_LIMIT), accepted)

    def _freeze(self, name: str, value: object) -> None:
        """Keep an own copy, so that the caller's list may change later."""
        object.__setattr__(self, name, value)


def _check_so_args(given: object) -> None:
    accepted = f'a mapping with exactly one of {", ".join(GRAMMARS)}, and optionally "partial": True'
    _take("so_args", given, isinstance(given, Mapping), accepted)
    assert isinstance(given, Mapping)
    kinds = [kind for kind in GRAMMARS if kind in given]
    _take("so_args", given, len(kinds) == 1 and set(given) <= {*kinds, "partial"}, accepted)
    value = given[kinds[0]]
    if kinds[0] == "json_schema":
        good, takes = isinstance(value, str | Mapping | bool), "a JSON schema: a mapping, a bool, or its JSON text"
    else:
        good, takes = isinstance(value, str), "a string"
    _take(f"so_args[{kinds[0]!r}]", value, good, takes)
    partial = given.get("partial", False)
    _take("so_args['partial']", partial, isinstance(partial, bool), "True or False")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_int(value) and value >= 0


def _is_positive(value: Any) -> bool:
    return _is_int(value) and value >= 1


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    return _is_number(value) and abs(value) < math.inf


def _is_bias(value: Any) -> bool:
    return _is_number(value) and (abs(value) <= 1e9 or value == -math.inf)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _take(name: str, value: object, good: bool, accepted: str) -> None:
    if not good:
        _refuse(name, value, accepted)


def _refuse(name: str, value: object, accepted: str) -> NoReturn:
    raise RequestError(f"SamplingParams: {name} is {value!r:.200}; it takes {accepted}")
