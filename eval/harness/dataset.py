"""The questions of a run: from a file, checked by checksum and count, or by name from the hub."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from eval.harness.benchmarks import Benchmark
from eval.harness.errors import EvalError
from eval.harness.hub import CHECKSUMS, fetch
from eval.harness.problems import Problem, read_problem

SAMPLE, HUB = "sample", "hub"
Extent = Literal["whole", "part", "sample"]


@dataclass(frozen=True)
class Dataset:
    """Questions and the file they came from. sha256: of its bytes. extent: how much of the benchmark they are."""

    path: Path
    sha256: str
    extent: Extent
    problems: tuple[Problem, ...]

    @property
    def images(self) -> int:
        """How many questions have a picture."""
        return sum(problem.image is not None for problem in self.problems)


def load_dataset(benchmark: Benchmark, data: str, sha256: str | None = None, questions: int | None = None) -> Dataset:
    """Read the questions of a benchmark.

    data: "hub" (the set by name, fetched once), "sample" (the generated set) or the path of a JSON Lines file.
    sha256: checksum that the file must have; without it the one that `SHA256SUMS` beside the file lists, if any does.
    questions: how many there must be, where the file is not the whole set. EvalError if anything does not fit.
    """
    path = _locate(benchmark, data)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise EvalError(
            f"{path} cannot be read ({error.strerror}); --data takes hub, sample or a JSONL file"
        ) from error
    found = hashlib.sha256(content).hexdigest()
    expected = sha256 or listed_checksum(path)
    if expected is not None and found != expected.lower():
        raise EvalError(f"{path} has the SHA-256 {found}, not {expected}: it was changed, or is another file")
    extent: Extent = "sample" if data == SAMPLE else "whole" if questions in (None, benchmark.questions) else "part"
    dataset = Dataset(path, found, extent, _parse(content, benchmark, path))
    _check_count(benchmark, dataset, questions)
    return dataset


def _locate(benchmark: Benchmark, data: str) -> Path:
    if data == SAMPLE:
        return benchmark.sample_file
    if data != HUB:
        return Path(data)
    if not benchmark.cached_file.is_file():
        fetch(benchmark)
    return benchmark.cached_file


def listed_checksum(path: Path) -> str | None:
    """What `SHA256SUMS` in the directory of `path` says about it; None if there is none, or it does not list it."""
    sums = path.with_name(CHECKSUMS)
    if not sums.is_file():
        return None
    listed = (line.split() for line in sums.read_text("utf-8").splitlines())
    return next((words[0] for words in listed if len(words) == 2 and words[1].lstrip("*") == path.name), None)


def _parse(content: bytes, benchmark: Benchmark, path: Path) -> tuple[Problem, ...]:
    problems: dict[str, Problem] = {}
    for number, line in enumerate(content.split(b"\n"), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            fields = json.loads(line)
        except ValueError as error:
            raise EvalError(f"{where} is not JSON ({error}); a set is a file of JSON Lines in UTF-8") from None
        problem = read_problem(fields, benchmark.kind, where)
        if problem.id in problems:
            raise EvalError(f"{where} has the id {problem.id!r} of an earlier line; every question takes its own")
        problems[problem.id] = problem
    return tuple(problems.values())


def _check_count(benchmark: Benchmark, dataset: Dataset, questions: int | None) -> None:
    found = (len(dataset.problems), dataset.images)
    whole = (benchmark.questions, benchmark.images)
    if dataset.extent == "sample":
        whole = (benchmark.sample_questions, benchmark.sample_images)
    if questions is not None and found[0] != questions:
        raise EvalError(f"{dataset.path} has {found[0]} questions, not the {questions} of --questions")
    if questions is None and found != whole:
        raise EvalError(
            f"{dataset.path} has {_counted(found)}; {benchmark.title} has {_counted(whole)}; "
            f"for a part of the set say how many there are: --questions {found[0]}"
        )


def _counted(counts: Sequence[int]) -> str:
    return f"{counts[0]} questions, {counts[1]} with pictures"
