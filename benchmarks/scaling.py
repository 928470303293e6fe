"""One process against many ranks, through LLM.generate: time to the first token of a long prompt, prompts, decoding.

    python benchmarks/scaling.py [--ranks 2] [--prompt 1500] [--requests 8] [--tokens 32]
    DEEPINFER_ACCELERATOR=nvidia python benchmarks/scaling.py --prompt 100000 --rows 16384          # two GPUs

For each layout the engine is started anew, answers everything once to warm up, and then `--rounds` times; medians, and
their ratio to one process. "first token": a prompt alone that gives one token. "prompts": as many as `--requests`, one
token each. "decode": short prompts, so many that give `--tokens` each. On a CPU ranks must have cores of their own for
any gain; a step holds `--rows` rows.
"""

import argparse
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from measure import machine, seconds, text

from deepinfer import LLM, SamplingParams


def layouts(ranks: int) -> dict[str, dict[str, int]]:
    """What is compared, by name."""
    return {
        "one process": {},
        f"dp {ranks}": {"dp": ranks, "ep": 1},
        f"dp {ranks}, ep {ranks}": {"dp": ranks, "ep": ranks},
        f"cp {ranks}": {"cp": ranks, "dp": 1, "ep": 1},
        f"cp {ranks}, ep {ranks}": {"cp": ranks, "ep": ranks},
    }


def greedy(tokens: int) -> SamplingParams:
    """So many tokens."""
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


def measures(llm: LLM, options: argparse.Namespace) -> dict[str, Callable[[], object]]:
    """What is timed, by name."""
    long = [text(options.model, options.prompt, 97 * number) for number in range(options.requests)]
    short = [text(options.model, 16, 89 * number) for number in range(options.requests)]
    return {
        "first token, s": lambda: llm.generate(long[:1], greedy(1), use_tqdm=False),
        "prompts, s": lambda: llm.generate(long, greedy(1), use_tqdm=False),
        "decode, s": lambda: llm.generate(short, greedy(options.tokens), use_tqdm=False),
    }


def taken(layout: dict[str, int], options: argparse.Namespace) -> list[float]:
    """Medians of one layout."""
    settings: dict[str, Any] = {"prefix_cache": False, "max_num_batched_tokens": options.rows, **layout}
    llm = LLM(options.model, load_format=options.load_format, **settings)
    work = measures(llm, options)
    times = [[seconds(one) for one in work.values()] for _ in range(options.rounds + 1)][1:]
    llm.close()
    return [median(column) for column in zip(*times, strict=True)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line a layout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", help="checkpoint directory (default: the bundled one)")
    add("--load_format", choices=("checkpoint", "random"), default="checkpoint", help="random: weights are made up")
    add("--ranks", type=int, default=2, help="ranks of the layouts with many (%(default)s)")
    add("--prompt", type=int, default=1500, help="tokens of a long prompt (%(default)s)")
    add("--requests", type=int, default=8, help="requests at once (%(default)s)")
    add("--tokens", type=int, default=32, help="tokens to decode (%(default)s)")
    add("--rows", type=int, default=4096, help="most rows of a step (%(default)s)")
    add("--rounds", type=int, default=3, help="how often each is timed (%(default)s)")
    options = parser.parse_args(arguments)
    print(machine())
    print("| layout | first token, s | prompts, s | decode, s | ratios to one process |")
    print("|---|---|---|---|---|")
    base: list[float] = []
    for name, layout in layouts(options.ranks).items():
        found = taken(layout, options)
        base = base or found
        ratios = " ".join(f"{one / other:.2f}" for one, other in zip(base, found, strict=True))
        print(f"| {name} | {' | '.join(f'{value:.3f}' for value in found)} | {ratios} |", flush=True)


if __name__ == "__main__":
    main()
