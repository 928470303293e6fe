"""The options of `deepinfer generate` that say how tokens are chosen; their names are those of `SamplingParams`."""

import argparse
from dataclasses import fields
from typing import Any

from deepinfer.core.errors import RequestError
from deepinfer.core.sampling_params import SamplingParams

_OF_DRAWS = {"top_p": "--top-p", "top_k": "--top-k", "min_p": "--min-p", "n": "-n"}


def add_sampling(group: Any) -> None:
    """Add the options; one that is not given leaves the default of `SamplingParams`, but for greedy decoding."""

    def option(*flags: str, name: str, about: str, **settings: Any) -> None:
        group.add_argument(*flags, dest=name, default=argparse.SUPPRESS, help=about, **settings)

    group.add_argument("--max-tokens", type=int, default=256, metavar="N", help="most new tokens (%(default)s)")
    group.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0, the default, is greedy")
    option("--top-p", name="top_p", about="draw from the likeliest tokens with this share (1)", type=float, metavar="P")
    option("--top-k", name="top_k", about="draw from so many likeliest tokens (all)", type=int, metavar="K")
    option("--min-p", name="min_p", about="draw from tokens this times as likely as the likeliest (0)", type=float,
           metavar="P")  # fmt: skip
    option("--seed", name="seq_seed", about="of the draws at a temperature above 0 (a fresh one)", type=int,
           metavar="N")  # fmt: skip
    option("-n", name="n", about="completions of each prompt (1)", type=int, metavar="N")
    option("--stop", name="stop", about="text that ends an answer; may be given again", action="append",
           metavar="TEXT")  # fmt: skip
    option("--stop-token-id", name="stop_token_ids", about="token that ends an answer; may be given again", type=int,
           action="append", metavar="ID")  # fmt: skip
    option("--min-tokens", name="min_tokens", about="fewest new tokens (0)", type=int, metavar="N")
    option("--ignore-eos", name="ignore_eos", about="go on after the end-of-sequence token", action="store_true")
    for kind, when in (("presence", "once for each token that came"), ("frequency", "each time that a token came")):
        option(f"--{kind}-penalty", name=f"{kind}_penalty", about=f"taken from logits, {when} (0)", type=float,
               metavar="X")  # fmt: skip
    option("--repetition-penalty", name="repetition_penalty", about="divides logits of tokens seen, the prompt too (1)",
           type=float, metavar="X")  # fmt: skip
    option("--logit-bias", name="logit_bias", about="added to a token's logit, -inf: never; may be given again",
           type=_bias, action="append", metavar="ID=X")  # fmt: skip
    option("--logprobs", name="logprobs", about="with --json: log-probabilities, also of the N likeliest", type=int,
           metavar="N")  # fmt: skip
    option("--prompt-logprobs", name="prompt_logprobs", about="the same of the prompt's tokens", type=int,
           metavar="N")  # fmt: skip


def sampling_params(arguments: argparse.Namespace) -> SamplingParams:
    """What was asked for; RequestError for values that will not do and for options of draws without draws."""
    known = [field.name for field in fields(SamplingParams)]
    given = {name: value for name, value in vars(arguments).items() if name in known}
    for name, flag in _OF_DRAWS.items():
        if name in given and not arguments.temperature:
            raise RequestError(f"{flag} is for draws; pass a --temperature above 0 with it")
    if "logit_bias" in given:
        given["logit_bias"] = dict(given["logit_bias"])
    return SamplingParams(**given)


def _bias(text: str) -> tuple[int, float]:
    token, _, value = text.partition("=")
    return int(token), float(value)
