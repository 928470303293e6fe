"""Time to the first token of a prompt whose beginning the cache holds, against one it has not seen.

    python benchmarks/prefix_hits.py [--prefixes 500 1000 2000 3500] [--tail 64] [--rounds 3]

Every round takes a prefix that nobody has sent yet. Cold: prefix and a tail. Warm: the same prefix and another tail.
Disk: the same again in an engine that has just been started over the directory of the first one.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from measure import machine, ratio, seconds, text

from deepinfer import LLM, SamplingParams

FIRST_TOKEN = SamplingParams(temperature=0, max_tokens=1)


class Rounds:
    """Takes the three times of each round; every prefix is new."""

    def __init__(self, model: str | None, directory: Path, tail: int) -> None:
        self._model, self._directory, self._tail = model, directory, tail
        self._llm = LLM(model, disk_cache=directory)
        self._used = 0

    def measure(self, prefix: int) -> tuple[float, float, float]:
        """Seconds to the first token: cold, warm, and from disk after a restart."""
        shared = self._fresh(prefix)
        cold = self._first_token(shared, hit=False)
        warm = self._first_token(shared, hit=True)
        self._llm.close()
        self._llm = LLM(self._model, disk_cache=self._directory)
        return cold, warm, self._first_token(shared, hit=True)

    def _fresh(self, count: int) -> list[int]:
        self._used += 1
        return text(self._model, count, 131 * self._used)

    def _first_token(self, shared: Sequence[int], hit: bool) -> float:
        prompt = [*shared, *self._fresh(self._tail)]
        outputs = []
        self._llm.generate(prompt[:2], FIRST_TOKEN, use_tqdm=False)  # wakes the engine up
        spent = seconds(lambda: outputs.extend(self._llm.generate(prompt, FIRST_TOKEN, use_tqdm=False)))
        if (outputs[0].cached_tokens > 0.8 * len(shared)) != hit:
            raise RuntimeError(f"{outputs[0].cached_tokens} of {len(shared)} tokens were cached: {outputs[0].miss}")
        return spent


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure each length of the shared prefix and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="checkpoint directory (default: the bundled one)")
    parser.add_argument("--prefixes", type=int, nargs="+", default=[500, 1000, 2000, 3500], help="shared tokens")
    parser.add_argument("--tail", type=int, default=64, help="tokens of a prompt that are not shared")
    parser.add_argument("--rounds", type=int, default=3, help="how often each is measured, in turns")
    options = parser.parse_args(arguments)
    print(machine())
    print(f"{'prefix':>8}  {'cold ms':>8}  {'warm ms':>8}  {'disk ms':>8}  {'warm / cold':<20}  disk / cold")
    with TemporaryDirectory() as directory:
        rounds = Rounds(options.model, Path(directory), options.tail)
        for prefix in options.prefixes:
            cold, warm, disk = zip(*(rounds.measure(prefix) for _ in range(options.rounds)), strict=True)
            times = "  ".join(f"{median(taken) * 1000:>8.0f}" for taken in (cold, warm, disk))
            print(f"{prefix:>8}  {times}  {ratio(warm, cold):<20}  {ratio(disk, cold)}")


if __name__ == "__main__":
    main()
