"""`deepinfer calibrate`: fits the temperatures of the drafter's confidence to prompts like those to be served."""

import argparse
from typing import Any

from deepinfer.checkpoint.locate import resolve_model
from deepinfer.cli.prompts import STDIN, read_prompts
from deepinfer.core.errors import RequestError
from deepinfer.core.sampling_params import SamplingParams

_ABOUT = "fits the drafter's confidence to what is accepted, and keeps the temperatures beside the checkpoint"


def add_command(commands: Any) -> None:
    """Add `calibrate` to the subcommands."""
    parser = commands.add_parser(
        "calibrate", help=_ABOUT, description=f"{_ABOUT.capitalize()}. Take prompts like those that are to be served."
    )
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="a prompt (default: those on standard input)")
    parser.add_argument("--file", metavar="FILE", help=f"a prompt a line, after those given; {STDIN}: standard input")
    parser.add_argument("--model", help="a checkpoint's directory or name (default: as for generate)")
    parser.add_argument("--chat", action="store_true", help="take each prompt as what a user says in a chat")
    parser.add_argument("--max-tokens", type=int, default=128, metavar="N", help="most tokens of a reply (%(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="of the replies; 0 is greedy")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Answer the prompts, fit, and keep the result."""
    from deepinfer.llm import LLM  # here: with it comes all of the engine
    from deepinfer.speculative.calibration import fit, report

    prompts = read_prompts(arguments.prompts, arguments.file)
    params = SamplingParams(temperature=arguments.temperature, max_tokens=arguments.max_tokens)
    directory = resolve_model(arguments.model)
    llm = LLM(directory, varlen=False)
    rounds = llm.record_rounds()
    if arguments.chat:
        llm.chat([[{"role": "user", "content": prompt}] for prompt in prompts], params)
    else:
        llm.generate(prompts, params)
    if not rounds:
        raise RequestError("every reply ended before a draft could be verified; take more prompts, or longer replies")
    where = arguments.file or f"{len(prompts)} prompts"
    calibration, before, after = fit(rounds, f"{where}, temperature {arguments.temperature:g}")
    print(report(calibration, before, after))
    print(f"kept in {calibration.save(directory)}")
    return 0
