"""Fits the temperatures of the drafter's confidence head and writes them beside the checkpoint.

    python -m train.calibrate --model checkpoints/mini

The rounds come from greedy replies to exercises held out from training, of the kinds that `eval/mini.py` measures but
from random streams of their own: no seed given there makes the exercises fitted on here.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from deepinfer import LLM
from deepinfer.checkpoint.locate import resolve_model
from deepinfer.core.errors import ConfigError, DeepInferError
from deepinfer.speculative.calibration import fit, report
from deepinfer.speculative.rounds import Round
from deepinfer.text.tokenizer import Tokenizer
from eval.questions import COUNTS, QuestionMaker
from eval.replies import answer

PURPOSE = "calibration"


def collect(directory: Path, counts: Mapping[str, int], seed: int, shown: bool = True) -> list[Round]:
    """The rounds of greedy replies to `counts[task]` exercises of each task; ConfigError if there are none."""
    llm = LLM(directory, varlen=False)
    rounds = llm.record_rounds()
    tokenizer = Tokenizer.from_file(directory)
    answer(llm, QuestionMaker(llm.config, tokenizer).make(counts, PURPOSE, seed), shown)
    if not rounds:
        raise ConfigError("every reply ended with its first token, so nothing was drafted; take more exercises")
    return rounds


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="checkpoint directory (default: DEEPINFER_HF_MODEL_DIR, else the bundled one)")
    parser.add_argument(
        "--samples", type=int, default=200, metavar="N", help="exercises of each short task (default: %(default)s)"
    )
    parser.add_argument(
        "--passkeys", type=int, default=40, metavar="N", help="exercises with long prompts (default: %(default)s)"
    )
    parser.add_argument(
        "--tasks", nargs="+", choices=list(COUNTS), default=list(COUNTS), metavar="TASK", help="default: %(default)s"
    )
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    counts = {task: options.passkeys if task == "passkey" else options.samples for task in options.tasks}
    try:
        directory = resolve_model(options.model)
        rounds = collect(directory, counts, options.seed)
        calibration, before, after = fit(rounds, f"held-out exercises of {', '.join(counts)}; seed {options.seed}")
        print(report(calibration, before, after))
        print(f"written: {calibration.save(directory)}")
    except (DeepInferError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
