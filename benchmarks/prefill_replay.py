"""Prefill with bounded replay (`compact`) against the decoder half over the whole prompt (`off`).

    python benchmarks/prefill_replay.py [--lengths 500 1000 2000 4000] [--rounds 3]

Time from a prompt to its first token, one request, without a prefix cache. Both modes do the same up to the middle of
the model; `compact` then runs only the last window + 12 tokens. So the time it saves is at most the decoder half's.
"""

import argparse
import os
from collections.abc import Sequence
from functools import partial
from statistics import median

from measure import in_turns, machine, ratio, seconds, text

from deepinfer import LLM, SamplingParams

VARIABLE = "DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE"
FIRST_TOKEN = SamplingParams(temperature=0, max_tokens=1)


def prefill(llm: LLM, ids: Sequence[int]) -> float:
    """Seconds to the first token."""
    return seconds(lambda: llm.generate(ids, FIRST_TOKEN, use_tqdm=False))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure each length and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="checkpoint directory (default: the bundled one)")
    parser.add_argument("--lengths", type=int, nargs="+", default=[500, 1000, 2000, 4000], help="prompt tokens")
    parser.add_argument("--rounds", type=int, default=3, help="how often each is measured, in turns")
    options = parser.parse_args(arguments)
    llms = {}
    for mode in ("compact", "off"):
        os.environ[VARIABLE] = mode
        llms[mode] = LLM(options.model, prefix_cache=False)
    print(machine())
    print(f"{'prompt':>8}  {'compact':>8}  {'off':>8}  tokens/s; time of compact / off")
    for length in options.lengths:
        ids = text(options.model, length)
        taken = in_turns({mode: partial(prefill, llm, ids) for mode, llm in llms.items()}, options.rounds)
        compact, off = taken["compact"], taken["off"]
        print(f"{length:>8}  {length / median(compact):>8.0f}  {length / median(off):>8.0f}  {ratio(compact, off)}")


if __name__ == "__main__":
    main()
