#!/usr/bin/env python3
"""Measures what reduced precision costs: the same exercises and text with the engine in FP32, in BF16, and quantised.

Quantised means that matrices stay in FP8 and FP4 as they are stored and inputs of products are rounded to FP8: what
runs on a GPU by default. Exits with 0 if BF16 and quantised lose at most one point of accuracy in every task and 1% of
perplexity against FP32, with 1 if they lose more, with 2 if it cannot be measured.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script: `eval` and `train` lie beside it

from deepinfer import LLM, DeepInferError, SamplingParams
from deepinfer.checkpoint.locate import resolve_model
from deepinfer.checkpoint.reader import CONFIG_FILE
from deepinfer.config.envs import describe_environment
from deepinfer.config.model import ModelConfig
from deepinfer.text.tokenizer import Tokenizer
from eval.questions import COUNTS, QuestionMaker, heldout_documents
from eval.replies import answer

WAYS: dict[str, dict[str, Any]] = {
    "FP32": {"dtype": "float32", "keep_quantized": False},
    "BF16": {"dtype": "bfloat16", "keep_quantized": False},
    "quantised": {"dtype": "bfloat16", "keep_quantized": True},
}
POINTS, PERPLEXITY = 0.01, 0.01
PERPLEXITY_NAME = "perplexity of English text"
_PIECE = 1023


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=f"environment variables:\n{describe_environment()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", help="checkpoint directory (default: DEEPINFER_HF_MODEL_DIR, else the bundled one)")
    parser.add_argument("--samples", type=int, default=200, help="exercises of each task (default: %(default)s)")
    parser.add_argument("--tasks", nargs="+", choices=list(COUNTS), default=list(COUNTS), help="default: all")
    parser.add_argument("--documents", type=int, help="of the held-out text (default: all)")
    parser.add_argument("--seed", type=int, default=1, help="other seeds make other exercises (default: %(default)s)")
    return parser.parse_args(arguments)


def measure(options: argparse.Namespace, directory: Path, way: dict[str, Any]) -> dict[str, float]:
    """The share of right replies of each task, and the perplexity a token of the text."""
    config, tokenizer = ModelConfig.from_file(directory / CONFIG_FILE), Tokenizer.from_file(directory)
    maker, llm = QuestionMaker(config, tokenizer), LLM(directory, **way)
    found: dict[str, float] = {}
    for task in options.tasks:
        questions = maker.make({task: min(options.samples, COUNTS[task])}, "mini", options.seed)
        replies = answer(llm, questions, shown=False)
        found[task] = sum(reply.correct for reply in replies) / len(replies)
    ids = [tokenizer.encode(document) for document in heldout_documents()[: options.documents]]
    found[PERPLEXITY_NAME] = perplexity(llm, ids, config.bos_token_id)
    return found


def perplexity(llm: LLM, documents: Sequence[Sequence[int]], start: int) -> float:
    """Per token, of documents in pieces that are each read after the token `start` and nothing else."""
    pieces = [[start, *found[at : at + _PIECE]] for found in documents for at in range(0, len(found), _PIECE)]
    scored = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    outputs = llm.generate(pieces, scored, use_tqdm=False)
    told = [one for output in outputs for one in (output.prompt_logprobs or ())[1:]]
    if len(told) != sum(len(piece) - 1 for piece in pieces) or None in told:
        raise DeepInferError("not every token of the text was scored")
    return math.exp(-sum(one.logprob for one in told if one is not None) / len(told))


def show(measured: dict[str, dict[str, float]]) -> tuple[str, bool]:
    """The table in Markdown, and whether nothing is lost beyond the limits."""
    lines = [f"| | {' | '.join(measured)} |", f"|---{'|---' * len(measured)}|"]
    kept = True
    exact = next(iter(measured.values()))
    for name, wanted in exact.items():
        cells = []
        for values in measured.values():
            value = values[name]
            if name == PERPLEXITY_NAME:
                lost, text = value > wanted * (1 + PERPLEXITY), f"{value:.2f} ({value / wanted - 1:+.2%})"
            else:
                lost, text = value < wanted - POINTS - 1e-9, f"{value:.1%}"
            kept &= not lost
            cells.append(f"{text}{' LOST' if lost else ''}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines), kept


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    try:
        directory = Path(resolve_model(options.model))
        table, kept = show({name: measure(options, directory, way) for name, way in WAYS.items()})
    except (DeepInferError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(table)
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
