#!/usr/bin/env python3
"""Prefills the same text in the three modes of bounded replay: what agrees, what differs, and what it costs."""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from deepinfer import LLM, DeepInferError, SamplingParams
from deepinfer.cache.storage import Caches
from deepinfer.checkpoint.locate import resolve_model
from deepinfer.checkpoint.reader import Checkpoint
from deepinfer.config.engine import EngineConfig
from deepinfer.core.plan import Span
from deepinfer.core.request import TEXT as TEXT_TOKEN
from deepinfer.core.request import Request
from deepinfer.engine.model_runner import ModelRunner
from deepinfer.engine.replay import LONGEST_ROLLBACK
from deepinfer.model.loading import load_weights
from deepinfer.model.model import InferenceModel
from deepinfer.text.engram_classes import engram_classes
from deepinfer.text.tokenizer import Tokenizer

VARIABLE = "DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE"
MODES = ("compact", "mask", "off")
TEXT = Path(__file__).parents[2] / "eval" / "heldout.txt"


@dataclass(frozen=True)
class Outcome:
    """Of one mode: logits [K, vocab] of the prompt's last rows, greedy tokens, seconds of each prefill."""

    logits: Tensor
    tokens: tuple[int, ...]
    seconds: tuple[float, ...]


@torch.inference_mode()
def suffix_logits(model: InferenceModel, ids: Sequence[int], keep: int, mode: str) -> Tensor:
    """Run the whole prompt in one step over fresh caches; logits [keep, vocab] of its last rows.

    This is all that the modes differ in. `cut`: decoder windows of rows at or after it see nothing before it.
    `decoder_from`: the first row that the decoder half runs at all.
    """
    start = len(ids) - keep
    span = Span(
        request_id=0,
        slot=0,
        first=0,
        count=len(ids),
        token_ids=tuple(ids),
        write_from=0,
        floor=0,
        cut=0 if mode == "off" else start,
        decoder_from=start if mode == "compact" else 0,
        sample=False,
    )
    page_size = EngineConfig.page_size
    caches = Caches(model.config, pages=-(-len(ids) // page_size), slots=1, page_size=page_size)
    caches.page_table[0] = torch.arange(caches.pages)
    runner = ModelRunner(model, caches, model.config.vocab_size)
    runner.admit(0, Request(0, None, tuple(ids), (TEXT_TOKEN,) * len(ids), (), SamplingParams(), seed=0))
    batch = runner.batch([span])
    last_rows = torch.arange(len(batch.decoder_rows))[-keep:]
    return model.step(replace(batch, sample_rows=last_rows), caches).logits


def engines(directory: Path) -> dict[str, LLM]:
    """An engine for each mode, chosen as a user does: by the environment."""
    before = os.environ.get(VARIABLE)
    made = {}
    for mode in MODES:
        os.environ[VARIABLE] = mode
        made[mode] = LLM(directory, prefix_cache=False)
    if before is None:
        del os.environ[VARIABLE]
    else:
        os.environ[VARIABLE] = before
    return made


def timed_prefill(llm: LLM, ids: Sequence[int]) -> float:
    """Seconds to the first token."""
    begin = time.perf_counter()
    llm.generate(ids, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    return time.perf_counter() - begin


def compare(
    model: InferenceModel, llms: dict[str, LLM], ids: Sequence[int], tokens: int, repeats: int
) -> dict[str, Outcome]:
    """Run one prompt in all modes; the modes are timed in turns, so that a busy machine slows all of them."""
    keep = model.config.sliding_window + LONGEST_ROLLBACK
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    replies = {mode: llm.generate(ids, params, use_tqdm=False)[0].token_ids for mode, llm in llms.items()}
    times = [{mode: timed_prefill(llm, ids) for mode, llm in llms.items()} for _ in range(repeats)]
    return {
        mode: Outcome(suffix_logits(model, ids, keep, mode), replies[mode], tuple(taken[mode] for taken in times))
        for mode in MODES
    }


def differences(one: Tensor, other: Tensor) -> Tensor:
    """Relative difference of each row: [K]."""
    return (one - other).norm(dim=-1) / other.norm(dim=-1)


def equal(one: Sequence[int], other: Sequence[int]) -> str:
    """How many tokens agree before the first that does not."""
    same = next((n for n, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]), len(one))
    return f"all {same}" if same == len(one) else f"{same} of {len(one)}"


def show(length: int, keep: int, outcomes: dict[str, Outcome]) -> None:
    """Print a table for one prompt."""
    mask, off = outcomes["mask"], outcomes["off"]
    print(f"\n{length} prompt tokens; compared: logits of the last {keep} rows, greedy tokens after them")
    heads = f"{'worst':<15} {'worst':<9} {'last row':<10} {'as mask':<12} as off"
    print(f"  {'':<8} {'prefill':>9} {'':>7}   {'logits to mask':<15} {'logits to off':<20} greedy tokens")
    print(f"  {'mode':<8} {'seconds':>9} {'of off':>7}   {heads}")
    for mode, found in outcomes.items():
        to_mask, to_off = differences(found.logits, mask.logits), differences(found.logits, off.logits)
        ratio = median(one / other for one, other in zip(found.seconds, off.seconds, strict=True))
        print(
            f"  {mode:<8} {median(found.seconds):>9.2f} {ratio:>7.2f}   {to_mask.max():<15.1e} "
            f"{to_off.max():<9.1e} {to_off[-1]:<10.1e} {equal(found.tokens, mask.tokens):<12} "
            f"{equal(found.tokens, off.tokens)}"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="checkpoint directory (default: DEEPINFER_HF_MODEL_DIR, else the bundled one)")
    parser.add_argument("--lengths", type=int, nargs="+", default=[300, 1000, 3000], help="prompt tokens (%(default)s)")
    parser.add_argument("--tokens", type=int, default=32, help="greedy tokens to compare (%(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="timed prefills of each mode (%(default)s)")
    options = parser.parse_args(arguments)
    try:
        directory = resolve_model(options.model)
        llms = engines(directory)
        checkpoint, tokenizer = Checkpoint(directory), Tokenizer.from_file(directory)
        model = InferenceModel(checkpoint.config, load_weights(checkpoint), engram_classes(tokenizer))
        text = [checkpoint.config.bos_token_id, *tokenizer.encode(TEXT.read_text(encoding="utf-8"))]
        keep = checkpoint.config.sliding_window + LONGEST_ROLLBACK
        for length in options.lengths:
            if not keep < length <= len(text):
                raise DeepInferError(f"a length is {length}; it takes more than {keep} tokens, up to {len(text)}")
            show(length, keep, compare(model, llms, text[:length], options.tokens, options.repeats))
    except DeepInferError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
