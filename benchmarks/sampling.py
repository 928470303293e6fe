"""Time per token of sampling, options one by one and together, with and without a grammar's mask.

    python benchmarks/sampling.py [--device cpu] [--batches 1 32 128] [--vocabulary 129280] [--rounds 5]

Every row of a batch asks for the same. The bound is one pass over the logits (their largest, row by row), which any
sampler needs; `sorting` is temperature, top-k, top-p and draw the plain way, with the vocabulary sorted. What one draws
from matters to neither: cut-offs look at every token. Times on a CPU are processor time, which other jobs disturb less.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import torch
from measure import in_turns, machine, ratio, seconds
from torch import Tensor

from deepinfer import SamplingParams
from deepinfer.core.batch import Batch, Half, Pairs
from deepinfer.core.plan import Span
from deepinfer.core.request import Request
from deepinfer.core.sampled import SampledRow, TokenMasks
from deepinfer.sampling.sampler import Sampler

EOS = 1
BIAS = dict.fromkeys(range(100, 120), -1.0)
CASES = {
    "greedy": SamplingParams(temperature=0),
    "temperature": SamplingParams(temperature=0.8),
    "top_k 50": SamplingParams(top_k=50),
    "top_p 0.9": SamplingParams(top_p=0.9),
    "min_p 0.05": SamplingParams(min_p=0.05),
    "top_k 50, top_p 0.9": SamplingParams(temperature=0.8, top_k=50, top_p=0.9),
    "penalties, bias": SamplingParams(presence_penalty=0.5, frequency_penalty=0.2, logit_bias=BIAS),
    "logprobs 5": SamplingParams(logprobs=5),
    "greedy, mask": SamplingParams(temperature=0),
    "temperature, mask": SamplingParams(temperature=0.8),
    "everything, mask": SamplingParams(
        temperature=0.8, top_k=50, top_p=0.9, min_p=0.01, presence_penalty=0.5, frequency_penalty=0.2,
        repetition_penalty=1.1, logit_bias=BIAS, min_tokens=9, logprobs=5,
    ),
}  # fmt: skip


class Step:
    """A step of decode rows that all ask for the same, over logits of which each call takes a copy."""

    def __init__(self, batch: int, vocabulary: int, device: torch.device) -> None:
        random = torch.Generator().manual_seed(batch)
        self._source = (torch.randn(batch, vocabulary, generator=random) * 3).to(device)
        self._logits = torch.empty_like(self._source)
        bits = torch.randint(-(2**31), 2**31, (batch, -(-vocabulary // 32)), generator=random, dtype=torch.int32)
        self._masks = TokenMasks(torch.arange(batch, device=device), bits.to(device))
        self._device = device

    def sampling(self, case: str) -> Callable[[], object]:
        """What draws a token a row."""
        sampler = Sampler(
            torch.zeros(self._source.shape[1], dtype=torch.bool, device=self._device), len(self._source), EOS
        )
        rows = [SampledRow(number, number, 8) for number in range(len(self._source))]
        for row in rows:
            sampler.admit(row.request_id, Request(0, None, (5, 6, 7), (), (), CASES[case], row.request_id))
            _read(sampler, row, [5, 6, 7, 100, 101, 102, 100, 9], self._device)
        masks = self._masks if case.endswith("mask") else None
        return lambda: sampler.sample(self._logits, rows, masks)

    def one_pass(self) -> Tensor:
        """The bound."""
        return self._logits.amax(-1)

    def sorting(self) -> Tensor:
        """The plain way: sort, cut at top-k 50 and top-p 0.9, draw."""
        values, ids = (self._logits / 0.8).sort(-1, descending=True)
        values[:, 50:] = -torch.inf
        shares = values.softmax(-1)
        shares[shares.cumsum(-1) - shares > 0.9] = 0
        return ids.gather(-1, torch.multinomial(shares, 1))

    def seconds(self, action: Callable[[], object]) -> float:
        """How long `action` takes on fresh logits: on a CPU processor time, else the device's work included."""
        self._logits.copy_(self._source)
        if self._device.type == "cpu":
            begin = time.process_time()
            action()
            return time.process_time() - begin
        torch.cuda.synchronize(self._device)
        return seconds(lambda: (action(), torch.cuda.synchronize(self._device)))


def _read(sampler: Sampler, row: SampledRow, ids: Sequence[int], device: torch.device) -> None:
    """Let the sampler count the tokens of a request."""
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    positions = torch.arange(len(ids), device=device)
    half = Half((), positions, torch.full_like(positions, row.slot), nothing)
    batch = Batch(torch.tensor(ids, device=device), half, half, nothing, nothing, nothing, Pairs(*[nothing] * 5))
    sampler.read([Span(row.request_id, row.slot, 0, len(ids), tuple(ids), 0, 0, 0, 0, True)], batch)


@torch.inference_mode()
def main(arguments: Sequence[str] | None = None) -> None:
    """Measure each batch and case and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="torch device (%(default)s)")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 128], help="rows of a step")
    parser.add_argument("--vocabulary", type=int, default=129_280, help="tokens (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="how often each is measured, in turns")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    print(machine(), torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU", sep=", ")
    print(f"{'batch':>6}  {'case':<20}  {'us/token':>8}  {'step, ms':>8}  case / one pass; case / sorting")
    for batch in options.batches:
        step = Step(batch, options.vocabulary, device)
        actions = {"one pass": step.one_pass, "sorting": step.sorting, **{case: step.sampling(case) for case in CASES}}
        measures = {name: partial(step.seconds, action) for name, action in actions.items()}
        in_turns(measures, 1)  # what is allocated and compiled once is not part of it
        taken = in_turns(measures, options.rounds)
        for name in actions:
            spent = median(taken[name])
            print(
                f"{batch:>6}  {name:<20}  {spent / batch * 1e6:>8.1f}  {spent * 1e3:>8.3f}  "
                f"{ratio(taken[name], taken['one pass'])}; {ratio(taken[name], taken['sorting'])}"
            )


if __name__ == "__main__":
    main()
