"""Host time of one step of the scheduler, with a model that does nothing and every running request decoding.

    python benchmarks/scheduler_host_time.py [--requests 64 512] [--steps 1000] [--runs 3]

One step is `plan()` and `commit()`, with the page manager of the engine. The prompts are cut to different lengths, so
that in every step some requests fill a page and take another, and some new pages are published. Prints the median, the
99th percentile and the slowest step of the best run (the machine may be busy), for both loops. What was loaded before
the first step is frozen out of garbage collection, as in a server: else a collection of the whole heap, torch's modules
included, stops one step in a thousand for 100 ms.
"""

import argparse
import gc
import time

from deepinfer.cache.manager import KVManager
from deepinfer.core.request import Request
from deepinfer.core.sampling_params import SamplingParams
from deepinfer.engine.replay import ReplayPolicy
from deepinfer.engine.scheduler import EndRules, Scheduler, SchedulerLimits

PAGE_SIZE = 64
PROMPT = 512
EOS = 1
TOKEN = 7


def main() -> None:
    """Measure each number of requests in both loops and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=[64, 512], help="running requests")
    parser.add_argument("--steps", type=int, default=1000, help="measured decode steps of a run")
    parser.add_argument("--runs", type=int, default=3, help="the best of so many runs counts")
    arguments = parser.parse_args()
    print(f"{'requests':>8}  {'loop':<12}  {'median ms':>9}  {'p99 ms':>7}  {'max ms':>7}")
    for requests in arguments.requests:
        for ahead in (0, 1):
            runs = [measure(requests, arguments.steps, ahead) for _ in range(arguments.runs)]
            times = min(runs, key=lambda run: run[len(run) // 2])
            median, high = times[len(times) // 2], times[len(times) * 99 // 100]
            name = "asynchronous" if ahead else "plain"
            print(f"{requests:>8}  {name:<12}  {median:>9.3f}  {high:>7.3f}  {times[-1]:>7.3f}")


def measure(requests: int, steps: int, ahead: int) -> list[float]:
    """Return the sorted times of `steps` decode steps in ms; `ahead` steps are planned before one is committed."""
    scheduler = start(requests, steps)
    gc.freeze()
    in_flight = []
    times: list[float] = []
    while len(times) < steps:
        begin = time.perf_counter()
        plan = scheduler.plan()
        spent = time.perf_counter() - begin
        if plan is None:
            raise RuntimeError("nothing to run before all steps were measured")
        in_flight.append(plan)
        tokens = {span.request_id: (TOKEN,) for span in in_flight[0].spans if span.sample}
        begin = time.perf_counter()
        if len(in_flight) > ahead:
            scheduler.commit(in_flight.pop(0).number, tokens)
        spent += time.perf_counter() - begin
        if scheduler.statistics.steps > ahead + 1 and plan.rows == requests:  # prompts are through
            times.append(spent * 1000)
    return sorted(times)


def start(requests: int, steps: int) -> Scheduler:
    """Return a scheduler with `requests` prompts that all generate until the measurement is over."""
    tokens = PROMPT + steps + 64
    kv = KVManager(requests * (tokens // PAGE_SIZE + 2), PAGE_SIZE, "benchmark")
    limits = SchedulerLimits(max_num_seqs=requests, max_num_batched_tokens=requests * PROMPT)
    scheduler = Scheduler(limits, ReplayPolicy("compact", 140), 128, kv, EndRules(EOS, 1_000_000))
    params = SamplingParams(max_tokens=steps + 32)
    for index in range(requests):
        ids = tuple(range(index + 2, index + 2 + PROMPT - index % PAGE_SIZE))
        scheduler.add(Request(index, None, ids, (-1,) * len(ids), (), params, 0))
    return scheduler


if __name__ == "__main__":
    main()
