"""What a token costs as the context before it grows.

    python benchmarks/context_cost.py [--contexts 1024 2048 4096 8192 16384 32768] [--rounds 5]

Steps of the model over caches: one decode row of one request, one decode row each of 8 requests, and a chunk of 256
prompt tokens, all at the end of a context of so many tokens. The caches hold random entries instead of a prefilled
text, and the checkpoint's context limit is lifted: the work is the same, what comes out means nothing. A step's time is
the least of several in a row, as the machine may be busy. The ratios are to the first context, in the same round.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import median

import torch
from measure import in_turns, machine, ratio, seconds, text

from deepinfer.cache.storage import Caches
from deepinfer.checkpoint.locate import resolve_model
from deepinfer.checkpoint.reader import Checkpoint
from deepinfer.core.plan import Plan, Span
from deepinfer.core.request import TEXT, Request
from deepinfer.core.sampling_params import SamplingParams
from deepinfer.engine.model_runner import ModelRunner
from deepinfer.model.loading import load_weights
from deepinfer.model.model import InferenceModel
from deepinfer.ops.kv_formats import pack_index, pack_latent, pack_window
from deepinfer.text.engram_classes import engram_classes
from deepinfer.text.tokenizer import Tokenizer

PAGE_SIZE = 64
REQUESTS = 8
REPEATS = 6
CHUNK = 256


class Steps:
    """A model over caches full of random entries; `REQUESTS` requests can stand at any position."""

    def __init__(self, model: str | None, longest: int) -> None:
        directory = resolve_model(model)
        checkpoint = Checkpoint(directory)
        config = replace(checkpoint.config, max_position_embeddings=longest + PAGE_SIZE)
        engine = InferenceModel(config, load_weights(checkpoint), engram_classes(Tokenizer.from_file(directory)))
        pages = REQUESTS * -(-config.max_position_embeddings // PAGE_SIZE)
        self._caches = Caches(config, pages, REQUESTS, PAGE_SIZE)
        self._runner = ModelRunner(engine, self._caches, config.vocab_size)
        self._ids = tuple(text(model, CHUNK))
        _fill(self._caches, config.head_dim, config.index_head_dim)
        self._caches.page_table.copy_(torch.randperm(pages).view(REQUESTS, -1))
        for number in range(REQUESTS):
            params = SamplingParams(temperature=0)
            self._runner.admit(number, Request(number, None, self._ids, (TEXT,) * CHUNK, (), params, seed=0))

    def decode(self, context: int, requests: int) -> float:
        """Seconds of a step with one row of each request, which sees `context` tokens with its own."""
        return self._run([self._span(slot, context - 1, 1, decodes=True) for slot in range(requests)])

    def prefill(self, context: int) -> float:
        """Seconds of a step with the last `CHUNK` of the first `context` tokens of a longer prompt."""
        return self._run([self._span(0, context - CHUNK, CHUNK, decodes=False)])

    def _span(self, slot: int, first: int, count: int, decodes: bool) -> Span:
        return Span(
            request_id=slot,
            slot=slot,
            first=first,
            count=count,
            token_ids=self._ids[:count],
            write_from=0,
            floor=0,
            cut=0,
            decoder_from=0 if decodes else first + count,
            sample=decodes,
        )

    def _run(self, spans: Sequence[Span]) -> float:
        return min(seconds(lambda: self._runner.run(Plan(0, tuple(spans)))) for _ in range(REPEATS))


def _fill(caches: Caches, head_dim: int, index_dim: int) -> None:
    """Random values in the stored formats."""
    for stored, pack, width in (
        *((part, pack_latent, head_dim) for part in caches.latents),
        *((part, pack_index, index_dim) for part in caches.index_keys),
        (caches.windows, pack_window, head_dim),
    ):
        rows = pack(torch.randn(4096, width))
        flat = stored.view(-1, stored.shape[-1])
        flat.copy_(rows[torch.randint(0, len(rows), (len(flat),))])


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure each length of context and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="checkpoint directory (default: the bundled one)")
    lengths = [1024, 2048, 4096, 8192, 16384, 32768]
    parser.add_argument("--contexts", type=int, nargs="+", default=lengths, help="tokens, the first for the ratios")
    parser.add_argument("--rounds", type=int, default=5, help="how often each is measured, in turns")
    options = parser.parse_args(arguments)
    steps = Steps(options.model, max(options.contexts))
    kinds = {
        "decode, 1 request": (1, lambda context: steps.decode(context, 1)),
        f"decode, {REQUESTS} requests": (REQUESTS, lambda context: steps.decode(context, REQUESTS)),
        f"prefill, chunk of {CHUNK}": (CHUNK, steps.prefill),
    }
    print(machine())
    for kind, (tokens, step) in kinds.items():
        print(f"\n{kind}\n{'context':>8}  {'ms a token':>10}  to {options.contexts[0]}")
        step(max(options.contexts))  # the first step of a kind is slower
        measures = {str(context): partial(step, context) for context in options.contexts}
        taken = in_turns(measures, options.rounds)
        for context in options.contexts:
            spent = taken[str(context)]
            each = median(spent) * 1000 / tokens
            print(f"{context:>8}  {each:>10.3f}  {ratio(spent, taken[str(options.contexts[0])])}")


if __name__ == "__main__":
    main()
