"""Every benchmark runs on a small model and prints a line for each case; doc/performance.md names them all."""

import importlib
import os
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import batch_invariance
import context_cost
import decode_speed
import many_requests
import measure
import prefill_replay
import prefix_hits
import sampling
import scaling

ROOT = Path(__file__).parents[1]
Output = pytest.CaptureFixture[str]


def figures(out: str) -> list[list[float]]:
    """The numbers of every line of a table: its first column is a number, too."""
    lines = [line for line in out.splitlines() if re.match(r"^ +\d+ ", line)]
    return [[float(number) for number in re.findall(r"\d+\.?\d*", line)] for line in lines]


def check(out: str, first_column: list[int]) -> None:
    """A line a case, nothing but positive numbers, and each ratio between its least and its largest."""
    table = figures(out)
    assert [row[0] for row in table] == first_column
    assert all(number > 0 for row in table for number in row)
    ratios = re.findall(r"([\d.]+) \(([\d.]+) to ([\d.]+)\)", out)
    assert len(ratios) >= len(table)
    for median, least, most in ratios:
        assert float(least) <= float(median) <= float(most)


def test_decode_speed(tiny_checkpoint: Path, capsys: Output) -> None:
    arguments = ["--requests", "1", "3", "--prompt", "20", "--tokens", "8", "--rounds", "2"]
    decode_speed.main(["--model", str(tiny_checkpoint), *arguments])
    check(capsys.readouterr().out, [1, 3])


def test_sampling(capsys: Output) -> None:
    sampling.main(["--batches", "1", "5", "--vocabulary", "300", "--rounds", "2"])
    lines = [line for line in capsys.readouterr().out.splitlines() if re.match(r"^ +\d+ ", line)]
    names = ["one pass", "sorting", *sampling.CASES]
    assert [line[8:].split("  ")[0] for line in lines] == names * 2
    assert [float(line.split()[0]) for line in lines] == [1.0] * len(names) + [5.0] * len(names)
    assert all(float(line[30:38]) > 0 for line in lines)


def test_batch_invariance(tiny_checkpoint: Path, capsys: Output) -> None:
    arguments = ["--requests", "1", "3", "--prompt", "20", "--tokens", "4", "--rounds", "2"]
    batch_invariance.main(["--model", str(tiny_checkpoint), *arguments])
    check(capsys.readouterr().out, [1, 1, 3, 3])
    assert batch_invariance.VARIABLE not in os.environ


def test_prefill_replay(tiny_checkpoint: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(prefill_replay.VARIABLE, "mask")  # so that it is taken back afterwards
    prefill_replay.main(["--model", str(tiny_checkpoint), "--lengths", "60", "120", "--rounds", "2"])
    check(capsys.readouterr().out, [60, 120])


def test_prefix_hits(tiny_checkpoint: Path, capsys: Output) -> None:
    prefix_hits.main(["--model", str(tiny_checkpoint), "--prefixes", "200", "400", "--tail", "9", "--rounds", "2"])
    check(capsys.readouterr().out, [200, 400])


def test_prefix_hits_are_hits(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """A time of a miss must not pass for one of a hit."""
    rounds = prefix_hits.Rounds(str(tiny_checkpoint), tmp_path, tail=5)
    with pytest.raises(RuntimeError, match="0 of 200 tokens were cached"):
        rounds._first_token(list(range(3, 203)), hit=True)


def test_context_cost(tiny_checkpoint: Path, capsys: Output) -> None:
    contexts = [300, 3000]  # the second lies beyond the model's own limit of 2048
    context_cost.main(["--model", str(tiny_checkpoint), "--contexts", "300", "3000", "--rounds", "2"])
    check(capsys.readouterr().out, contexts * 3)


def test_many_requests(tiny_checkpoint: Path, capsys: Output) -> None:
    many_requests.main(["--model", str(tiny_checkpoint), "--requests", "40", "--longest", "60", "--tokens", "5"])
    out = capsys.readouterr().out
    memory = [int(found) for found in re.findall(r"^resident .*: (\d+) MiB$", out, re.M)]
    assert len(memory) == 4
    assert all(found > 50 for found in memory)
    assert re.search(r"^40 requests, 0 failed, \d+ \+ \d+ tokens in", out, re.M)
    assert "40 finished" in out


def test_the_mixed_requests_are_mixed(tiny_checkpoint: Path) -> None:
    prompts, params = many_requests.workload(str(tiny_checkpoint), 300, 400, 32)
    again, _ = many_requests.workload(str(tiny_checkpoint), 300, 400, 32)
    lengths = sorted(map(len, prompts))
    assert prompts == again
    assert lengths[0] < 4
    assert 300 < lengths[-1] <= 400
    assert {one.temperature for one in params} == {0, 1}
    assert {1, 32} <= {one.max_tokens for one in params}
    beginnings = [tuple(prompt[:40]) for prompt in prompts if len(prompt) >= 40]
    assert len(set(beginnings)) < len(beginnings)


@pytest.mark.slow
def test_scaling(tiny_checkpoint: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    every = scaling.layouts(2)
    assert list(every) == ["one process", "dp 2", "dp 2, ep 2", "cp 2", "cp 2, ep 2"]
    monkeypatch.setattr(scaling, "layouts", lambda ranks: {name: every[name] for name in ("one process", "cp 2")})
    arguments = ["--prompt", "90", "--requests", "2", "--tokens", "3", "--rounds", "1"]
    scaling.main(["--model", str(tiny_checkpoint), *arguments])
    lines = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("|")][2:]
    assert [line[0].strip() for line in lines] == ["one process", "cp 2"]
    assert all(float(cell) > 0 for line in lines for cell in line[1:4])
    assert lines[0][4].split() == ["1.00"] * 3


def test_ratios_are_those_of_rounds() -> None:
    assert measure.ratio([1, 20, 3], [1, 10, 1]) == "2.00 (1.00 to 3.00)"
    calls: list[str] = []
    measures = {name: lambda name=name: calls.append(name) or float(len(calls)) for name in "ab"}
    assert measure.in_turns(measures, 2) == {"a": [1, 3], "b": [2, 4]}
    assert calls == ["a", "b", "a", "b"]


def test_text_starts_over(tiny_checkpoint: Path) -> None:
    ids = measure.text(str(tiny_checkpoint), 10)
    longer = measure.text(str(tiny_checkpoint), 5, offset=5)
    assert ids[5:] == longer
    assert len(measure.text(str(tiny_checkpoint), 10**6 // 2)) == 500_000


def test_the_document_names_every_benchmark() -> None:
    text = (ROOT / "doc" / "performance.md").read_text(encoding="utf-8")
    for path in (ROOT / "benchmarks").glob("*.py"):
        module = importlib.import_module(path.stem)
        if hasattr(module, "main"):
            assert f"benchmarks/{path.name}" in text
