"""What a run is made with, as `run.json` states it: everything that a sample depends on, and where it was."""

import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

import deepinfer
from deepinfer import SamplingParams
from deepinfer.checkpoint.identity import checkpoint_identity
from deepinfer.config.envs import Environment
from eval.harness.benchmarks import EVAL, Benchmark
from eval.harness.dataset import Dataset
from eval.harness.run_directory import WHERE

_NOT_OF_A_SAMPLE = ("model_dir", "nodes", "visible_devices", "ascend_launch_blocking", "ascend_log_to_stdout")


def make_record(
    benchmark: Benchmark,
    dataset: Dataset,
    directory: Path,
    environment: Environment,
    params: SamplingParams,
    asked: dict[str, Any],
) -> dict[str, Any]:
    """The record of a run; `asked`: number of samples, seed, form of the prompts, mode of the chat, type of numbers."""
    sampling = asdict(params)
    del sampling["seq_seed"]  # every sample has its own, made from the run's seed
    variables = asdict(environment)
    return {
        "benchmark": benchmark.name,
        "data": {
            "extent": dataset.extent,
            "sha256": dataset.sha256,
            "questions": len(dataset.problems),
            "images": dataset.images,
        },
        "checkpoint": checkpoint_identity(directory),
        "engine": {"version": deepinfer.__version__, "commit": source_commit()},
        "sampling": sampling,
        **asked,
        "environment": {
            name: value
            for name, value in variables.items()
            if name not in _NOT_OF_A_SAMPLE and not name.startswith("judge_")
        },
        WHERE: {"data": str(dataset.path), "model": str(directory)},
    }


def source_commit() -> str | None:
    """The commit of the source tree, with "-dirty" where files differ from it; None outside a git checkout."""
    line = ["git", "-C", str(EVAL.parent), "describe", "--always", "--dirty", "--abbrev=40", "--match="]
    try:
        return subprocess.run(line, capture_output=True, text=True, check=True).stdout.strip() or None
    except (OSError, subprocess.CalledProcessError):
        return None
