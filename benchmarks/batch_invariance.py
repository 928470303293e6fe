"""What batch invariance costs: the same prompts with and without DEEPINFER_BATCH_INVARIANT.

    python benchmarks/batch_invariance.py [--requests 1 8 32] [--prompt 200] [--tokens 24] [--rounds 7]

For R prompts at once, the rows a second of the steps that hold prompt rows and of those that do not (decode), and the
time of the invariant engine over that of the plain one in the same round. Each engine answers once before it counts.
"""

import argparse
import os
from collections.abc import Sequence
from statistics import median

from measure import in_turns, machine, ratio, text

from deepinfer import LLM, SamplingParams

VARIABLE = "DEEPINFER_BATCH_INVARIANT"
NAMES = ("plain", "invariant")


def load(model: str | None, invariant: bool, slots: int, dtype: str) -> LLM:
    """An engine with or without the mode."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = "1" if invariant else "0"
    try:
        return LLM(model, prefix_cache=False, max_num_seqs=slots, dtype=dtype)
    finally:
        os.environ.pop(VARIABLE)
        if before is not None:
            os.environ[VARIABLE] = before


def row_times(llm: LLM, prompts: Sequence[Sequence[int]], tokens: int) -> tuple[float, float]:
    """Seconds a row of one run: of the steps with prompt rows, of the others."""
    paces = llm.statistics.prefill, llm.statistics.decode
    before = [(pace.rows, pace.seconds) for pace in paces]
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True), use_tqdm=False)
    first, second = (
        (pace.seconds - seconds) / (pace.rows - rows) for pace, (rows, seconds) in zip(paces, before, strict=True)
    )
    return first, second


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure each number of requests and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="checkpoint directory (default: the bundled one)")
    parser.add_argument("--dtype", default="float32", help="float32 or bfloat16 (%(default)s)")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32], help="requests at once")
    parser.add_argument("--prompt", type=int, default=200, help="tokens of each prompt (%(default)s)")
    parser.add_argument("--tokens", type=int, default=24, help="generated tokens of each request (%(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="how often each is measured, in turns (%(default)s)")
    options = parser.parse_args(arguments)
    llms = {name: load(options.model, name == "invariant", max(options.requests), options.dtype) for name in NAMES}
    print(machine())
    print(f"{'requests':>8}  {'plain':>7}  {'invariant':>9}  rows/s; time, invariant / plain")
    for requests in options.requests:
        prompts = [text(options.model, options.prompt, 211 * number) for number in range(requests)]
        for llm in llms.values():
            row_times(llm, prompts, 2)
        measures = {
            name: lambda llm=llm, prompts=prompts: row_times(llm, prompts, options.tokens) for name, llm in llms.items()
        }
        taken = in_turns(measures, options.rounds)
        for kind, part in enumerate(("prefill", "decode")):
            plain, invariant = ([times[kind] for times in taken[name]] for name in NAMES)
            speeds = f"{1 / median(plain):>7.0f}  {1 / median(invariant):>9.0f}"
            print(f"{requests:>8}  {speeds}  {ratio(invariant, plain)}  {part}", flush=True)


if __name__ == "__main__":
    main()
