"""Many requests of mixed length through one call of LLM.generate: requests a second, and whether memory stays flat.

    python benchmarks/many_requests.py [--requests 10000] [--longest 400] [--tokens 32]

Prompts are cut from held-out text at random places, so some share beginnings; their lengths and reply lengths are drawn
evenly on a logarithmic scale, and half of the requests sample at temperature 1. Resident memory is read after loading,
and when a tenth, half and all of the requests have ended; caches are touched for the first time in the first tenth.
"""

import argparse
import os
import random
import threading
import time
from collections.abc import Sequence

from measure import machine, text

from deepinfer import LLM, SamplingParams

MARKS = (0.1, 0.5, 1.0)
PAUSE = 0.05  # seconds between two looks at the counters


def resident() -> float:
    """Resident memory of this process in MiB."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


class Watch(threading.Thread):
    """Reads the resident memory when the share of ended requests passes each of `MARKS`."""

    def __init__(self, llm: LLM, requests: int) -> None:
        super().__init__(daemon=True)
        self._llm, self._requests = llm, requests
        self._done = threading.Event()
        self.seen: list[float] = []

    def run(self) -> None:
        """Watch until told to stop."""
        while not self._done.wait(PAUSE):
            self.look()

    def look(self) -> None:
        """Note the memory for every mark that has been passed."""
        ended = self._llm.statistics.scheduler.ended
        while len(self.seen) < len(MARKS) and ended >= MARKS[len(self.seen)] * self._requests:
            self.seen.append(resident())

    def stop(self) -> None:
        """Take the last reading."""
        self._done.set()
        self.join()
        self.look()


def workload(
    model: str | None, requests: int, longest: int, tokens: int
) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts and their parameters, the same in every run."""
    source = random.Random(0)
    ids = text(model, 20000)

    def length(most: int) -> int:
        return round(most ** source.random())

    prompts, params = [], []
    for number in range(requests):
        start = source.choice(range(0, 16000, 50))
        prompts.append(ids[start : start + length(longest)])
        params.append(SamplingParams(temperature=number % 2, max_tokens=length(tokens), seq_seed=number))
    return prompts, params


def main(arguments: Sequence[str] | None = None) -> None:
    """Run them and print what it took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="checkpoint directory (default: the bundled one)")
    parser.add_argument("--requests", type=int, default=10000, help="how many (%(default)s)")
    parser.add_argument("--longest", type=int, default=400, help="most prompt tokens (%(default)s)")
    parser.add_argument("--tokens", type=int, default=32, help="most new tokens (%(default)s)")
    options = parser.parse_args(arguments)
    prompts, params = workload(options.model, options.requests, options.longest, options.tokens)
    llm = LLM(options.model)
    print(machine())
    print(f"resident after loading: {resident():.0f} MiB")
    watch = Watch(llm, options.requests)
    watch.start()
    begin = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=True)
    spent = time.perf_counter() - begin
    watch.stop()
    failed = sum(output.error is not None for output in outputs)
    prompt_tokens, made = sum(map(len, prompts)), sum(len(output.token_ids) for output in outputs)
    for mark, memory in zip(MARKS, watch.seen, strict=True):
        print(f"resident when {mark:.0%} have ended: {memory:.0f} MiB")
    print(f"{len(outputs)} requests, {failed} failed, {prompt_tokens} + {made} tokens in {spent:.0f} s")
    print(f"{len(outputs) / spent:.1f} requests/s, {(prompt_tokens + made) / spent:.0f} tokens/s")
    print(*llm.statistics.lines(), sep="\n")


if __name__ == "__main__":
    main()
