"""Time to fill grammar masks, alone and beside the model's steps, with and without drafts to be verified.

    python benchmarks/grammar_masks.py [--device cpu] [--tokenizer FILE] [--batches 1 32 128] [--drafts 5]

First, for R requests of each form at some place of a valid text: what `start` takes on the thread that runs the steps
(taking the newest tokens, and cutting blocks behind their first illegal draft), what filling the masks takes on its
own, and both over the time of drawing the same rows at a temperature, masks applied and not. Then the engine on
`--model`: its decode steps with free requests and with constrained ones, how long the masks of a step took to fill,
and how long the step waited for them when the model was done.
"""

import argparse
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from measure import in_turns, machine, ratio

from deepinfer import LLM, SamplingParams
from deepinfer.core.plan import Span
from deepinfer.core.request import Request
from deepinfer.core.sampled import SampledRow, TokenMasks
from deepinfer.sampling.grammar import grammars as module
from deepinfer.sampling.grammar.compiler import Compiler
from deepinfer.sampling.grammar.constraint import structured_output
from deepinfer.sampling.grammar.grammars import Grammars
from deepinfer.sampling.grammar.matcher import Matcher
from deepinfer.sampling.grammar.request import RequestGrammar
from deepinfer.sampling.grammar.vocabulary import Vocabulary
from deepinfer.sampling.sampler import Sampler
from deepinfer.text.tokenizer import Tokenizer

EOS = 1
PROMPT = (5, 6, 7)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 60},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"type": "string"}, "minItems": 20},
    },
    "required": ["name", "age", "tags"],
}
FORMS: dict[str, dict[str, Any]] = {
    "regex": {"regex": r"(\w+ )+\."},
    "json_schema": {"json_schema": PERSON},
    "ebnf": {"ebnf": 'root ::= (word " " [0-9]+ "\\n"){90}\nword ::= [a-z]{1,12}'},
}
BUNDLED = Path(__file__).parent.parent / "checkpoints" / "mini"


class Block:
    """R requests at the newest token of a reply, each with so many legal drafts behind it."""

    def __init__(self, vocabulary: Vocabulary, grammar: RequestGrammar, rows: int, drafts: int, device: torch.device):
        self._grammars = Grammars(vocabulary.words, device)
        self._device = device
        self._texts, self._places = [], []
        for number in range(rows):
            source = random.Random(number)
            place = source.randint(1, 12)
            self._texts.append(walked(grammar.matcher(), vocabulary, place + drafts, source))
            self._places.append(place)
            self._grammars.admit(number, Request(0, None, PROMPT, (), (), SamplingParams(), 0, grammar=grammar))
        ends = [len(PROMPT) + place for place in self._places]
        self._before = [Span(row, row, 0, end - 1, self._ids(row), 0, 0, 0, 0, True) for row, end in enumerate(ends)]
        self._spans = [Span(row, row, end - 1, 1 + drafts, None, 0, 0, 0, 0, True) for row, end in enumerate(ends)]
        self.times: list[tuple[float, float]] = []

    def _ids(self, row: int) -> tuple[int, ...]:
        return (*PROMPT, *self._texts[row][: self._places[row] - 1])

    def _drafts(self, span: Span) -> list[int]:
        place = self._places[span.slot]
        return self._texts[span.slot][place : place + span.drafts]

    def __call__(self) -> float:
        """Fill the masks of a step whose newest tokens were drawn just now; returns seconds and notes them in parts."""
        self._grammars.start(self._before, self._drafts)[1].result()
        newest = [text[place - 1] for text, place in zip(self._texts, self._places, strict=True)]
        self._grammars.sampled(self._before, torch.tensor(newest, device=self._device), [1] * len(newest))
        begin = time.perf_counter()
        cut, filling = self._grammars.start(self._spans, self._drafts)
        started = time.perf_counter()
        masks = filling.result()
        end = time.perf_counter()
        assert list(cut) == self._spans
        assert len(masks.rows) == sum(span.count for span in cut)
        self.times.append((started - begin, end - started))
        return end - begin


def walked(matcher: Matcher, vocabulary: Vocabulary, count: int, source: random.Random) -> list[int]:
    """Tokens drawn from what is allowed, the end left out."""
    tokens: list[int] = []
    for _ in range(count):
        bits = torch.zeros((1, vocabulary.words), dtype=torch.int32)
        matcher.fill(bits)
        allowed = np.flatnonzero(np.unpackbits(bits.numpy().view(np.uint8), bitorder="little")).tolist()
        tokens.append(source.choice([token for token in allowed if token != vocabulary.eos]))
        matcher.take(tokens[-1])
    return tokens


def drawing(rows: int, vocabulary: Vocabulary, device: torch.device, masked: bool) -> Callable[[], float]:
    """Draws a token for each of `rows` at a temperature; seconds, the device's work included."""
    source = (torch.randn(rows, vocabulary.size, generator=torch.Generator().manual_seed(rows)) * 3).to(device)
    sampler = Sampler(torch.zeros(vocabulary.size, dtype=torch.bool, device=device), rows, vocabulary.eos)
    sampled = [SampledRow(row, row, 8) for row in range(rows)]
    for row in range(rows):
        sampler.admit(row, Request(0, None, PROMPT, (), (), SamplingParams(temperature=0.8), row))
    bits = torch.randint(-(2**31), 2**31, (rows, vocabulary.words), dtype=torch.int32, device=device)
    masks = TokenMasks(torch.arange(rows, device=device), bits) if masked else None

    def draw() -> float:
        logits = source.clone()
        synchronise(device)
        begin = time.perf_counter()
        sampler.sample(logits, sampled, masks)
        synchronise(device)
        return time.perf_counter() - begin

    return draw


def synchronise(device: torch.device) -> None:
    """Wait for what was started on a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def alone(vocabulary: Vocabulary, batches: Sequence[int], drafts: int, rounds: int, device: torch.device) -> None:
    """The first table."""
    compiler = Compiler(vocabulary)
    grammars = {}
    for name, so_args in FORMS.items():
        constraint, begin = structured_output(so_args), time.perf_counter()
        grammars[name] = RequestGrammar(compiler.compile(constraint), constraint)
        grammars[name].wait()
        print(f"{name}: compiled in {(time.perf_counter() - begin) * 1e3:.0f} ms")
    print(
        f"\n{'requests':>8}  {'drafts':>6}  {'form':<12}  {'start, ms':>9}  {'fill, ms':>8}  {'us/row':>6}  / drawing"
    )
    for batch in batches:
        for depth in dict.fromkeys((0, drafts)):
            rows = batch * (1 + depth)
            measures: dict[str, Callable[[], float]] = {
                name: Block(vocabulary, grammar, batch, depth, device) for name, grammar in grammars.items()
            }
            blocks = dict(measures)
            measures["drawing"] = drawing(rows, vocabulary, device, masked=False)
            measures["drawing, mask"] = drawing(rows, vocabulary, device, masked=True)
            in_turns(measures, 1)
            for block in blocks.values():
                block.times.clear()  # type: ignore[attr-defined]
            taken = in_turns(measures, rounds)
            for name in measures:
                total = median(taken[name])
                parts = getattr(measures[name], "times", None)
                start, fill = ([median(part) * 1e3 for part in zip(*parts, strict=True)]) if parts else (0, total * 1e3)
                print(
                    f"{batch:>8}  {depth:>6}  {name:<13} {start:>9.3f}  {fill:>8.3f}  {total / rows * 1e6:>6.1f}  "
                    f"{ratio(taken[name], taken['drawing'])}",
                    flush=True,
                )


class Watch:
    """Adds up, while it is installed, how long masks take to fill and how long steps wait for them."""

    def __init__(self) -> None:
        self.filled, self.waited, self.started, self.steps = 0.0, 0.0, 0.0, 0

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Watch all engines of this process."""
        start, fill = Grammars.start, Grammars._fill

        def timed_fill(*arguments: Any) -> TokenMasks:
            begin = time.perf_counter()
            try:
                return fill(*arguments)
            finally:
                self.filled += time.perf_counter() - begin

        def timed_start(*arguments: Any) -> Any:
            begin = time.perf_counter()
            spans, filling = start(*arguments)
            self.started += time.perf_counter() - begin
            return spans, None if filling is None else _Timed(filling, self)

        module.Grammars.start, module.Grammars._fill = timed_start, timed_fill  # type: ignore[method-assign]
        try:
            yield
        finally:
            module.Grammars.start, module.Grammars._fill = start, fill  # type: ignore[method-assign]


class _Timed:
    def __init__(self, filling: "Future[TokenMasks]", watch: Watch) -> None:
        self._filling, self._watch = filling, watch

    def result(self) -> TokenMasks:
        begin = time.perf_counter()
        try:
            return self._filling.result()
        finally:
            self._watch.waited += time.perf_counter() - begin
            self._watch.steps += 1


def beside(model: str | None, batches: Sequence[int], drafts: int, tokens: int, device: torch.device) -> None:
    """The second table."""
    os.environ["DEEPINFER_ACCELERATOR"] = "nvidia" if device.type == "cuda" else "cpu"
    print("\nmilliseconds a step")
    print(
        f"{'requests':>8}  {'drafts':>6}  {'free':>10}  {'constrained':>11}  {'start':>6}  {'fill':>6}  {'waited':>6}"
    )
    for depth in dict.fromkeys((0, drafts)):
        llm = LLM(model, max_num_seqs=max(batches), nextn=depth, prefix_cache=False)
        for batch in batches:
            found = []
            for so_args in (None, *FORMS.values()):
                params = SamplingParams(
                    temperature=0.8, max_tokens=tokens, so_args=so_args, ignore_eos=so_args is None, seq_seed=3
                )
                watch = Watch()
                llm.generate(["A list: "] * batch, params, use_tqdm=False)
                pace = llm.statistics.decode
                before = pace.seconds, llm.statistics.scheduler.steps
                with watch.installed():
                    llm.generate(["A list: "] * batch, params, use_tqdm=False)
                pace, steps = llm.statistics.decode, llm.statistics.scheduler.steps
                found.append(((pace.seconds - before[0]) / (steps - before[1] - 1) * 1e3, watch))
            free = found[0][0]
            for name, (step, watch) in zip(FORMS, found[1:], strict=True):
                parts = [part / max(watch.steps, 1) * 1e3 for part in (watch.started, watch.filled, watch.waited)]
                print(
                    f"{batch:>8}  {depth:>6}  {free:>10.2f}  {step:>11.2f}  {parts[0]:>6.2f}  {parts[1]:>6.2f}  "
                    f"{parts[2]:>6.2f}  {name}",
                    flush=True,
                )


@torch.inference_mode()
def main(arguments: Sequence[str] | None = None) -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="torch device (%(default)s)")
    parser.add_argument("--tokenizer", type=Path, default=BUNDLED, help="tokenizer.json (default: the bundled one)")
    parser.add_argument("--size", type=int, help="ids of the model's vocabulary (default: the tokenizer's)")
    parser.add_argument("--model", help="checkpoint of the second table (default: the bundled one)")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 128], help="requests of a step")
    parser.add_argument("--drafts", type=int, default=5, help="drafts verified a request (%(default)s)")
    parser.add_argument("--tokens", type=int, default=40, help="tokens of the second table's replies (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="how often each is measured, in turns (%(default)s)")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    tokenizer = Tokenizer.from_file(options.tokenizer)
    vocabulary = Vocabulary(tokenizer, options.size or tokenizer.vocab_size, EOS)
    print(machine(), torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU", sep=", ")
    print(f"{vocabulary.size} tokens")
    alone(vocabulary, options.batches, options.drafts, options.rounds, device)
    beside(options.model, options.batches, options.drafts, options.tokens, device)


if __name__ == "__main__":
    main()
