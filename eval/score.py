#!/usr/bin/env python3
"""Judges the samples of a run of eval/generate.py, and writes summary.json and a picture beside them.

Scoring generates nothing and can be done again, also by another judge; where two judges have scored a run, their
agreement is reported. Exits with 0 (every sample is generated and judged), 1 (some are not) or 2 (it cannot be done).
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script: `eval` lies beside it

from deepinfer import ConfigError, DeepInferError
from deepinfer.cli.units import parse_positive
from deepinfer.config.envs import describe_environment, read_environment
from eval.harness.benchmarks import BENCHMARKS
from eval.harness.errors import EvalError
from eval.harness.judge_client import Endpoint, Patience
from eval.harness.llm_judge import LLMJudge
from eval.harness.math_judge import judge_by_math
from eval.harness.picture import draw
from eval.harness.problems import Problem
from eval.harness.rollouts import Key, Rollout
from eval.harness.rule_judge import judge_by_rule
from eval.harness.run_directory import RunDirectory
from eval.harness.summary import show, summarise
from eval.harness.verdicts import MODES, Case, Verdict, read_verdicts, write_verdicts

SUMMARY, PICTURE, CACHE = "summary.json", "accuracy.png", "judge.jsonl"


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=f"environment variables:\n{describe_environment()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out-dir", type=Path, required=True, metavar="DIR", help="directory of the run")
    parser.add_argument(
        "--judge",
        choices=MODES,
        required=True,
        help="rule: the integer in the last box, or the letter after ANSWER:; math: the meaning of a formula; "
        "llm: the model behind EVAL_JUDGE_BASE_URL",
    )
    llm = parser.add_argument_group("the judge llm")
    llm.add_argument("--concurrency", type=parse_positive, default=16, metavar="N", help="questions at a time (16)")
    llm.add_argument("--attempts", type=parse_positive, default=Patience.attempts, metavar="N", help="(%(default)s)")
    llm.add_argument("--timeout", type=_seconds, default=Patience.timeout, metavar="S", help="of one attempt (600)")
    llm.add_argument("--pause", type=_seconds, default=Patience.pause, metavar="S", help="before the second one (1)")
    parser.add_argument("--no-picture", action="store_true", help=f"do not draw {PICTURE}")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    return parser.parse_args(arguments)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1
    if not 0 < seconds < 1e6:
        raise argparse.ArgumentTypeError(f"takes a number of seconds above 0, not {text!r}")
    return seconds


def judge(options: argparse.Namespace, kind: str, cases: Sequence[Case]) -> list[Verdict]:
    if options.judge == "rule":
        if kind == "free":
            raise EvalError("this benchmark has free answers, which no rule can judge; score it with --judge llm")
        return judge_by_rule(cases)
    if options.judge == "math":
        return judge_by_math(cases)
    endpoint = read_endpoint()
    patience = Patience(options.attempts, options.timeout, options.pause)
    judge = LLMJudge(endpoint, options.out_dir / CACHE, options.concurrency, patience)
    return judge.judge(cases, shown=not options.quiet)


def read_endpoint() -> Endpoint:
    """The judge that the environment names; ConfigError if it names none."""
    environment = read_environment()
    for name, value in (
        ("EVAL_JUDGE_BASE_URL", environment.judge_base_url),
        ("EVAL_JUDGE_MODEL", environment.judge_model),
    ):
        if value is None:
            raise ConfigError(f"{name} is not set; --judge llm takes an OpenAI-style endpoint and a model's name there")
    return Endpoint(environment.judge_base_url or "", environment.judge_model or "", environment.judge_api_key)


def match(problems: Sequence[Problem], rollouts: dict[Key, Rollout], samples: int) -> list[Case]:
    """Every sample that was generated, with its question; EvalError for one of no question of the run."""
    known = {problem.id: problem for problem in problems}
    for question, sample in rollouts:
        if question not in known or not 0 <= sample < samples:
            raise EvalError(f"there is a sample {sample} of question {question!r}, which is none of this run")
    return [Case(known[key[0]], rollout) for key, rollout in sorted(rollouts.items()) if not rollout.failed]


def run(options: argparse.Namespace) -> int:
    directory = RunDirectory(options.out_dir)
    record, problems = directory.record, directory.problems()
    rollouts, repeated = directory.rollouts()
    cases = match(problems, rollouts, record["samples"])
    verdicts = judge(options, BENCHMARKS[record["benchmark"]].kind, cases)
    write_verdicts(directory, options.judge, verdicts)
    found = {mode: read_verdicts(directory, mode, rollouts) for mode in MODES}
    modes = {mode: verdicts for mode, verdicts in found.items() if verdicts is not None}
    questions = [problem.id for problem in problems]
    summary = summarise(record, questions, rollouts, repeated, modes, options.judge)
    directory.write(SUMMARY, json.dumps(summary, indent=1, ensure_ascii=False) + "\n")
    print(show(summary))
    report_missing(verdicts)
    if not options.no_picture:
        try_to_draw(directory.path / PICTURE, summary, rollouts, modes)
    return 0 if summary["coverage_complete"] else 1


def try_to_draw(
    path: Path, summary: dict[str, Any], rollouts: dict[Key, Rollout], modes: dict[str, dict[Key, Verdict]]
) -> None:
    """A machine without the drawing package can score all the same."""
    try:
        draw(path, summary, rollouts, modes)
    except EvalError as error:
        print(f"no picture: {error}", file=sys.stderr)


def report_missing(verdicts: Sequence[Verdict]) -> None:
    missing = [verdict for verdict in verdicts if verdict.correct is None]
    if missing:
        print(f"{len(missing)} samples have no verdict; the first: {missing[0].note}", file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        return run(parse_arguments(arguments))
    except (DeepInferError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; verdicts so far are kept", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
