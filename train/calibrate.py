"""Fits the temperatures of the drafter's confidence head and writes them beside the checkpoint.

    python -m train.calibrate --model checkpoints/mini

The rounds come from greedy replies to exercises held out from training, of the kinds that `eval/mini.py` measures but
from random streams of their own: no seed given there makes the exercises fitted on here.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tqdm import tqdm

from deepinfer import LLM
from deepinfer.checkpoint.locate import resolve_model
from deepinfer.core.errors import ConfigError, DeepInferError
from deepinfer.speculative.calibration import Calibration, Errors, Observations, errors, fit_temperatures
from deepinfer.speculative.rounds import Round
from eval.questions import COUNTS, QuestionMaker
from eval.replies import answer
from eval.target import Target

PURPOSE = "calibration"


def collect(directory: Path, counts: Mapping[str, int], seed: int, shown: bool = True) -> list[Round]:
    """The rounds of greedy replies to `counts[task]` exercises of each task; ConfigError if there are none."""
    target = Target(directory)
    if not target.config.draft_stages:
        raise ConfigError("this checkpoint has no draft stages (num_nextn_predict_layers is 0): nothing to calibrate")
    questions = QuestionMaker(target.config, target.tokenizer).make(counts, PURPOSE, seed)
    replies = answer(LLM(directory), questions, shown)
    progress = tqdm(replies, desc="drafting", disable=not shown)
    rounds = [round_ for reply in progress for round_ in target.replay(reply.question, reply.token_ids).rounds]
    if not rounds:
        raise ConfigError("every reply ended with its first token, so nothing was drafted; take more exercises")
    return rounds


def fit(rounds: Sequence[Round], dataset: str) -> tuple[Calibration, Errors, Errors]:
    """Temperatures fitted on `rounds`, and the errors on them before and after."""
    seen = Observations.of(rounds)
    temperatures = fit_temperatures(seen)
    before = errors(seen, Calibration.identity(len(temperatures)).temperatures)
    after = errors(seen, temperatures)
    return Calibration(temperatures, dataset, len(rounds), before.ece, after.ece), before, after


def report(calibration: Calibration, before: Errors, after: Errors) -> str:
    """A line for each position of a block, and one for all together."""
    columns = zip(calibration.temperatures, before.ece_by_position, after.ece_by_position, strict=True)
    lines = [f"{calibration.samples} rounds of {calibration.dataset}", "drafts  temperature  ECE before  ECE after"]
    lines += [f"{k:6}  {t:11.3f}  {one:10.4f}  {two:9.4f}" for k, (t, one, two) in enumerate(columns, 1)]
    lines.append(f"   all               {before.ece:10.4f}  {after.ece:9.4f}")
    return "\n".join(lines)


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
