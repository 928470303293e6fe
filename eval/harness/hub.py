"""Fetches a set from the Hugging Face hub, checks it against the hub's checksums, keeps it as JSON Lines."""

import csv
import fnmatch
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from eval.harness.benchmarks import Benchmark, HubSet
from eval.harness.errors import EvalError

CHECKSUMS = "SHA256SUMS"
_COLUMNS = {
    "aime": ("problem_idx", "problem", "answer"),
    "hle": ("id", "question", "image", "answer", "answer_type", "category"),
    "gpqa": ("Record ID", "Question", "Correct Answer", *(f"Incorrect Answer {number}" for number in (1, 2, 3))),
}


def fetch(benchmark: Benchmark) -> Path:
    """Download the files of a benchmark and write `cached_file` and its checksum; returns the file.

    EvalError where the hub cannot be reached, the set is not open to this user, or a file is not what the hub says.
    """
    target = benchmark.cached_file
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        with part.open("w", encoding="utf-8") as file:
            for path in _download(benchmark):
                for row in _rows(path):
                    file.write(json.dumps(_columns(row, benchmark, path), ensure_ascii=False) + "\n")
        digest = hashlib.sha256(part.read_bytes()).hexdigest()
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
    _list_checksum(target, digest)
    return target


def _columns(row: Mapping[str, Any], benchmark: Benchmark, path: Path) -> dict[str, Any]:
    missing = [name for name in _COLUMNS[benchmark.name] if name not in row]
    if missing:
        raise EvalError(f"{path} of {benchmark.hub.repository} has no column {missing[0]!r}; it was published anew")
    return {name: row[name] for name in _COLUMNS[benchmark.name]}


def _list_checksum(target: Path, digest: str) -> None:
    sums = target.with_name(CHECKSUMS)
    others = [line for line in sums.read_text("utf-8").splitlines() if line] if sums.is_file() else []
    others = [line for line in others if line.split()[-1] != target.name]
    sums.write_text("\n".join([*others, f"{digest}  {target.name}"]) + "\n", encoding="utf-8")


def _download(benchmark: Benchmark) -> Iterator[Path]:
    import huggingface_hub  # here: it is needed only where a set is asked for by name

    hub = benchmark.hub
    try:
        info = huggingface_hub.HfApi().dataset_info(hub.repository, revision=hub.revision, files_metadata=True)
        files = [entry for entry in info.siblings or [] if fnmatch.fnmatch(entry.rfilename, hub.pattern)]
        if not files:
            raise EvalError(f"{hub.repository} on the hub has no file {hub.pattern} at {info.sha}")
        for entry in sorted(files, key=lambda entry: entry.rfilename):
            path = huggingface_hub.hf_hub_download(
                hub.repository, entry.rfilename, repo_type="dataset", revision=info.sha
            )
            _check(Path(path), entry.lfs.sha256 if entry.lfs else None)
            yield Path(path)
    except EvalError:
        raise
    except Exception as error:  # the package raises those of its HTTP client, OSError and its own
        raise EvalError(_advice(benchmark, hub, error)) from error


def _check(path: Path, sha256: str | None) -> None:
    """Compare with the hub's own checksum, which it has for its large files."""
    if sha256 is not None and hashlib.sha256(path.read_bytes()).hexdigest() != sha256:
        raise EvalError(f"{path} does not have the SHA-256 {sha256} that the hub gives; remove it and try again")


def _advice(benchmark: Benchmark, hub: HubSet, error: Exception) -> str:
    reason = str(error).strip().partition("\n")[0] or type(error).__name__
    terms = "accept its terms on its page and log in with `hf auth login`, or " if hub.gated else ""
    return (
        f"{hub.repository} cannot be had from the Hugging Face hub ({reason}); {terms}pass the set as JSON Lines: "
        f"--data FILE. {benchmark.title}: {benchmark.licence}"
    )


def _rows(path: Path) -> Iterator[Mapping[str, Any]]:
    if path.suffix == ".csv":
        with path.open(encoding="utf-8", newline="") as file:
            yield from csv.DictReader(file)
        return
    try:
        from pyarrow import parquet
    except ImportError:
        raise EvalError(f"{path.name} is a Parquet file; install pyarrow (pip install 'deepinfer[hub]')") from None
    for batch in parquet.ParquetFile(path).iter_batches(64):
        yield from batch.to_pylist()
