"""The benchmark of the scheduler's host time runs and reports each case."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "scheduler_host_time.py"


def test_the_benchmark_reports_each_case():
    command = [sys.executable, str(SCRIPT), "--requests", "1", "3", "--steps", "70", "--runs", "1"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    rows = [line.split() for line in lines[1:]]
    assert [(row[0], row[1]) for row in rows] == [
        ("1", "plain"),
        ("1", "asynchronous"),
        ("3", "plain"),
        ("3", "asynchronous"),
    ]
    for row in rows:
        median, high, slowest = map(float, row[2:])
        assert 0 < median <= high <= slowest
