#!/usr/bin/env python3
"""Measures the small checkpoint on held-out data made from a seed, and compares with the bounds it must keep.

Exits with 0 if every bound is kept, with 1 if one is missed, with 2 if it cannot be measured. eval/README.md says how
each number is made.
"""

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script: `eval` and `train` lie beside it

from tqdm import tqdm

from deepinfer import LLM, DeepInferError
from deepinfer.checkpoint.locate import resolve_model
from deepinfer.config.envs import describe_environment
from deepinfer.speculative.calibration import Calibration
from eval.english import score_text
from eval.questions import COUNTS, QuestionMaker, heldout_documents
from eval.replies import Reply, answer
from eval.rows import agreement_row, draft_rows, english_row, task_row
from eval.table import Row, show
from eval.target import Replay, Target

ENGLISH = "english"
QUICK = dict.fromkeys(COUNTS, 16) | {"passkey": 3}
QUICK_DOCUMENTS = slice(None, None, 4)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    counts = ", ".join(f"{task} {count}" for task, count in COUNTS.items())
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=f"environment variables:\n{describe_environment()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", help="checkpoint directory (default: DEEPINFER_HF_MODEL_DIR, else the bundled one)")
    parser.add_argument("--samples", type=_positive, metavar="N", help=f"exercises of each task (default: {counts})")
    parser.add_argument("--seed", type=int, default=1, help="other seeds make other exercises (default: %(default)s)")
    parser.add_argument(
        "--tasks",
        nargs="+",
        choices=[*COUNTS, ENGLISH],
        default=[*COUNTS, ENGLISH],
        metavar="TASK",
        help="what to measure (default: %(default)s); DSpark is measured on the replies to these tasks",
    )
    parser.add_argument("--quick", action="store_true", help="a rough measure: fewer exercises, a quarter of the text")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table to FILE as JSON, too")
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    return parser.parse_args(arguments)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"takes a whole number of at least 1, not {text!r}")
    return int(text)


def count_samples(options: argparse.Namespace) -> dict[str, int]:
    default = QUICK if options.quick else COUNTS
    return {task: options.samples or default[task] for task in COUNTS if task in options.tasks}


def reply_all(options: argparse.Namespace, directory: Path, maker: QuestionMaker) -> dict[str, list[Reply]]:
    """The engine's replies, task by task."""
    counts = count_samples(options)
    questions = {task: maker.make({task: count}, "mini", options.seed) for task, count in counts.items()}
    if not questions:
        return {}
    llm = LLM(directory)
    replies = {}
    for task, asked in questions.items():
        if not options.quiet:
            print(f"{task}: {len(asked)} exercises", file=sys.stderr, flush=True)
        replies[task] = answer(llm, asked, shown=not options.quiet)
    return replies


def replay_all(target: Target, replies: Mapping[str, Sequence[Reply]], shown: bool) -> dict[str, list[Replay]]:
    """The reference's account of every reply, task by task."""
    replays = {}
    for task, found in replies.items():
        progress = tqdm(found, desc=f"drafting, {task}", disable=not shown)
        replays[task] = [target.replay(reply.question, reply.token_ids) for reply in progress]
    return replays


def measure(options: argparse.Namespace, directory: Path) -> list[Row]:
    shown = not options.quiet
    target = Target(directory)
    calibration = Calibration.load(directory, target.config.dspark_block_size)
    replies = reply_all(options, directory, QuestionMaker(target.config, target.tokenizer))
    rows = [task_row(task, found) for task, found in replies.items()]
    if ENGLISH in options.tasks:
        documents = heldout_documents()[QUICK_DOCUMENTS if options.quick else slice(None)]
        rows.append(english_row(score_text(target, documents, shown=shown)))
    if not replies:
        return rows
    replays = replay_all(target, replies, shown)
    return [*rows, *draft_rows(replays, calibration), agreement_row(replays)]


def run(options: argparse.Namespace) -> int:
    if options.json is not None and (options.json.is_dir() or not options.json.absolute().parent.is_dir()):
        raise DeepInferError(f"{options.json} cannot be written; --json takes a file in a directory that exists")
    directory = resolve_model(options.model)
    begin = time.perf_counter()
    rows = measure(options, directory)
    seconds = time.perf_counter() - begin
    passed = all(row.passed for row in rows)
    print(f"{show(rows)}\n\n{directory}, seed {options.seed}, {seconds:.0f} s")
    if options.json is not None:
        record = {"model": str(directory), "seed": options.seed, "seconds": seconds, "passed": passed}
        record |= {"rows": [row.as_json() for row in rows]}
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0 if passed else 1


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        return run(parse_arguments(arguments))
    except (DeepInferError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
