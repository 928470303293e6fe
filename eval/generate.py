#!/usr/bin/env python3
"""Samples answers to the questions of a benchmark, and keeps each one as soon as it is finished.

The samples go to eval/outputs/BENCH/TAG; a run that was stopped goes on where it was when the same command is given
again. Prints that directory, and exits with 0 (every sample is there), 1 (some failed: run it again), 2 (it cannot be
done) or 130 (stopped). eval/score.py judges the samples.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script: `eval` lies beside it

from deepinfer import LLM, DeepInferError, RequestOutput, SamplingParams
from deepinfer.checkpoint.locate import resolve_model
from deepinfer.cli.units import parse_bytes, parse_positive
from deepinfer.config.engine import DTYPES
from deepinfer.config.envs import describe_environment, read_environment
from eval.harness.benchmarks import BENCHMARKS, EVAL, Benchmark
from eval.harness.dataset import Dataset, load_dataset
from eval.harness.errors import EvalError
from eval.harness.journal import Journal
from eval.harness.launch import launch
from eval.harness.progress import Progress
from eval.harness.prompts import FORMS, make_messages
from eval.harness.rollouts import Task, make_rollout, make_tasks, shard
from eval.harness.run_directory import RunDirectory
from eval.harness.run_record import make_record


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=f"environment variables:\n{describe_environment()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--bench", required=True, choices=list(BENCHMARKS))
    parser.add_argument("--model", help="checkpoint directory (default: DEEPINFER_HF_MODEL_DIR, else the bundled one)")
    parser.add_argument("--tag", help="name of the run (default: the model's, with -sample for the generated set)")
    parser.add_argument("--out-dir", type=Path, metavar="DIR", help="instead of eval/outputs/BENCH/TAG")
    data = parser.add_argument_group("questions")
    data.add_argument("--data", default="hub", help="hub (the default: by name), sample, or a file of JSON Lines")
    data.add_argument("--sha256", metavar="HEX", help="checksum of the file (default: SHA256SUMS beside it, if any)")
    data.add_argument("--questions", type=parse_positive, metavar="N", help="how many a file of a part of the set has")
    _add_sampling(parser.add_argument_group("sampling"))
    engine = parser.add_argument_group("engine")
    engine.add_argument("--dp", type=parse_positive, default=1, metavar="N", help="ranks to start on this machine (1)")
    engine.add_argument("--rank", type=int, default=0, help="this process, where another launcher starts the ranks")
    engine.add_argument("--world", type=parse_positive, default=1, help="how many it starts")
    engine.add_argument("--dtype", choices=DTYPES, help="of weights and activations (default: the device's)")
    engine.add_argument("--max-requests", dest="max_num_seqs", type=parse_positive, default=32, metavar="N")
    engine.add_argument("--cache", dest="cache_bytes", type=parse_bytes, metavar="SIZE", help="memory for caches")
    parser.add_argument("--quiet", action="store_true", help="no progress bar, no statistics")
    return parser.parse_args(arguments)


def _add_sampling(group: Any) -> None:
    counts = ", ".join(f"{benchmark.name} {benchmark.samples}" for benchmark in BENCHMARKS.values())
    group.add_argument("--samples", type=parse_positive, metavar="N", help=f"of each question (default: {counts})")
    group.add_argument("--seed", type=int, default=0, help="every sample's seed is made from it (default: %(default)s)")
    group.add_argument("--temperature", type=float, default=1.0, help="0 is greedy (default: %(default)s)")
    group.add_argument("--top-p", type=float, default=0.95, help="(default: %(default)s)")
    group.add_argument("--max-tokens", type=parse_positive, default=131072, metavar="N", help="(default: %(default)s)")
    group.add_argument("--no-thinking", action="store_true", help="answer without reasoning first")
    group.add_argument("--reasoning-effort", choices=["low", "high", "max"], help="(default: the chat format's own)")
    group.add_argument("--regex", metavar="R", help="hold every reply to a regular expression (structured output)")
    group.add_argument("--prompt", choices=FORMS, default="full", help="bare: the question without instructions")


def output_directory(options: argparse.Namespace, model: Path) -> Path:
    if options.out_dir is not None:
        return Path(options.out_dir)
    tag = options.tag or model.resolve().name + ("-sample" if options.data == "sample" else "")
    if Path(tag).name != tag:
        raise EvalError(f"--tag is {tag!r}; it takes the name of a directory without slashes; --out-dir takes paths")
    return EVAL / "outputs" / str(options.bench) / tag


def begin(options: argparse.Namespace, model: Path, dataset: Dataset) -> tuple[RunDirectory, SamplingParams, int]:
    """State the run, or find it stated so; returns its directory, its sampling and the samples of each question."""
    benchmark: Benchmark = BENCHMARKS[options.bench]
    form = None if options.regex is None else {"regex": options.regex}
    params = SamplingParams(options.temperature, options.max_tokens, top_p=options.top_p, so_args=form)
    samples = options.samples or benchmark.samples
    asked = {
        "samples": samples,
        "seed": options.seed,
        "prompt": options.prompt,
        "thinking": not options.no_thinking,
        "reasoning_effort": options.reasoning_effort,
        "dtype": options.dtype,
    }
    directory = RunDirectory(output_directory(options, model))
    directory.begin(make_record(benchmark, dataset, model, read_environment(), params, asked), dataset.problems)
    return directory, params, samples


def sample(options: argparse.Namespace, model: Path, dataset: Dataset) -> tuple[RunDirectory, int]:
    """Generate what this rank still lacks; returns the run's directory and how many samples failed."""
    directory, params, samples = begin(options, model, dataset)
    mine = shard(make_tasks(dataset.problems, samples, options.seed), options.rank, options.world)
    with directory.open_rollouts(options.rank, options.world) as journal:
        done, _ = directory.rollouts()
        left = [task for task in mine if task.key not in done or done[task.key].failed]
        before = len(mine) - len(left)
        failed = generate(options, model, left, params, journal, before) if left else 0
    return directory, failed


def generate(
    options: argparse.Namespace,
    model: Path,
    tasks: Sequence[Task],
    params: SamplingParams,
    journal: Journal,
    before: int,
) -> int:
    """Run all tasks as one batch, keep each sample when it is finished, and return how many failed.

    before: samples that this rank has from earlier.
    """
    llm = LLM(model, **{name: getattr(options, name) for name in ("dtype", "max_num_seqs", "cache_bytes")})
    name = options.bench if options.world == 1 else f"{options.bench} rank {options.rank}"
    with Progress(name, before + len(tasks), before, not options.quiet, options.rank) as progress:

        def keep(output: RequestOutput) -> None:
            rollout = make_rollout(tasks[output.index], output)
            journal.append(rollout.as_json())
            progress.add(rollout)

        llm.chat(
            [make_messages(task.problem, options.prompt) for task in tasks],
            [replace(params, seq_seed=task.seed) for task in tasks],
            thinking=not options.no_thinking,
            reasoning_effort=options.reasoning_effort,
            use_tqdm=False,
            on_error="return",
            on_output=keep,
        )
    if not options.quiet:
        print(*llm.statistics.lines(), sep="\n", file=sys.stderr)
    return progress.failed


def run(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    if not 0 <= options.rank < options.world:
        raise EvalError(f"--rank is {options.rank}; it takes 0 to {options.world - 1}, one less than --world")
    benchmark = BENCHMARKS[options.bench]
    dataset = load_dataset(benchmark, options.data, options.sha256, options.questions)
    model = resolve_model(options.model)
    if options.dp > 1:
        status = launch(Path(__file__), arguments, options.dp, read_environment())
        print(output_directory(options, model))
        return status
    directory, failed = sample(options, model, dataset)
    if failed:
        print(f"{failed} samples failed; the same command tries them again", file=sys.stderr)
    print(directory.path)
    return 1 if failed else 0


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        return run(parse_arguments(arguments), arguments)
    except (DeepInferError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
