"""The sweep: a line a run, pictures and a table from them, and errors that say what is wrong."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SWEEP = ROOT / "examples" / "sweep"
RUN = {
    "prefill": {"mode": "prefill", "model": "released", "context_length": 8192, "prefill_batch_size": 4096,
                "prefill": {"tokens_per_s": 30000.0, "ms_per_step": 130.0, "bound_tokens_per_s": 69000.0}},
    "decode": {"mode": "decode", "model": None, "context_length": 8192, "decode_num_requests": 64,
               "decode": {"avg_SPS": 50.0, "tokens_per_s": 3200.0}},
}  # fmt: skip


def plot(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SWEEP / "plot_pareto.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_pictures_and_table(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    results = tmp_path / "results.jsonl"
    results.write_text("\n".join([*map(json.dumps, RUN.values()), "", json.dumps({"mode": "encoder"})]))
    made = plot(str(results), "--out", str(tmp_path / "out"))
    assert made.returncode == 0, made.stderr
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"prefill.svg", "decode.svg"}
    assert "30,000" in made.stdout
    assert "69,000" in made.stdout
    assert "default model, context 8,192" in made.stdout


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{broken", "results.jsonl:1: is no result"),
        ("[1]", "is no result"),
        ('{"mode": "decode", "decode": {}}', "is no result"),
    ],
)
def test_a_file_that_is_no_result(tmp_path: Path, text: str, says: str) -> None:
    results = tmp_path / "results.jsonl"
    results.write_text(text)
    made = plot(str(results))
    assert made.returncode == 2
    assert says in made.stderr


def test_nothing_to_draw(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    results.write_text("")
    assert "no prefill or decode results" in plot(str(results)).stderr
    assert plot(str(tmp_path / "absent")).returncode == 2


def sweep(folder: Path, *arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = ["bash", str(SWEEP / "run_sweep.sh"), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=folder, env={**environment, **settings}
    )


def test_a_sweep_of_decode_steps(tmp_path: Path) -> None:
    options = ["--context_length", "40", "--non_cached_tokens", "8", "--decode_steps", "2"]
    made = sweep(tmp_path, "decode", "try", *options, DECODE_SIZES="1 3")
    assert made.returncode == 0, made.stderr
    lines = (tmp_path / "sweeps" / "try" / "results.jsonl").read_text().splitlines()
    runs = [json.loads(line) for line in lines]
    assert [run["decode_num_requests"] for run in runs] == [1, 3]
    assert all(run["mode"] == "decode" and run["decode"]["avg_SPS"] > 0 for run in runs)


def test_wrong_modes_and_failed_runs(tmp_path: Path) -> None:
    wrong = sweep(tmp_path, "everything")
    assert wrong.returncode == 2
    assert "prefill|decode|encoder" in wrong.stderr
    failed = sweep(tmp_path, "decode", "--model", str(tmp_path / "absent"), DECODE_SIZES="1")
    assert failed.returncode == 1
    assert "failed" in failed.stderr
