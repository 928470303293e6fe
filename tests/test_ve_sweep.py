"""The sweep over the vision encoder: every case a line, in text and in JSON; what cannot be has one error."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "sweep"))

import ve_sweep
from benchmarking.images import parse_size, random_image, tower_operations, tower_seconds

from deepinfer.config.released import released_config
from deepinfer.core.errors import ConfigError

CASES = ["--sizes", "30x20", "20x60", "--batches", "1", "3", "--rounds", "2"]


def test_every_case_is_a_line(tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "results.jsonl"
    for load_format in ("checkpoint", "random"):
        arguments = ["--model", str(tiny_checkpoint), "--load_format", load_format, "--json", str(path), *CASES]
        assert ve_sweep.main(arguments) == 0
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["size"], row["images"]) for row in rows] == [
        (size, batch) for _ in range(2) for size in ("30x20", "20x60") for batch in (1, 3)
    ]
    for row in rows:
        assert row["mode"] == "encoder"
        assert row["patches_per_s"] == pytest.approx(row["images"] * row["patches"] / row["ms"] * 1e3)
    assert len(capsys.readouterr().out.splitlines()) == 2 * (2 + 4)


def test_it_is_a_mode_of_the_sweep(tiny_checkpoint: Path, tmp_path: Path) -> None:
    root = Path(__file__).parents[1]
    arguments = ["encoder", "tag", "--model", str(tiny_checkpoint), *CASES]
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(root)}
    script = root / "examples" / "sweep" / "run_sweep.sh"
    subprocess.run([script, *arguments], cwd=tmp_path, env=environment, check=True, capture_output=True)
    lines = (tmp_path / "sweeps" / "tag" / "results.jsonl").read_text().splitlines()
    assert [json.loads(line)["mode"] for line in lines] == ["encoder"] * 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sizes", "30"], "the image size is '30'; it takes a width and a height"),
        (["--sizes", "0x5"], "an image of 0 x 5 pixels is empty"),
        (["--model", "nowhere"], "nowhere"),
    ],
)
def test_errors(tiny_checkpoint: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ve_sweep.main(["--model", str(tiny_checkpoint), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_the_bound_counts_what_the_released_tower_does() -> None:
    """By hand, for a square of 93 x 93 patches that merge into 31 x 31 tokens."""
    config = released_config()
    image = random_image(config.vision, *parse_size("1302x1302"), 0)
    assert image.grid.patches == 93 * 93
    patches, cells = 93 * 93, 31 * 31
    block = patches * (4 * 1024**2 + 3 * 1024 * 2816) + 2 * patches**2 * 1024
    expected = 2 * (patches * 588 * 1024 + 32 * block + cells * (9 * 1024 * 5120 + 5120**2))
    assert tower_operations(config, [image.grid]) == expected
    assert tower_operations(config, [image.grid] * 3) == 3 * expected
    assert tower_seconds(config, [image.grid], 10**12) == pytest.approx(10**12 / 4.25e12)
    assert 0.01 < tower_seconds(config, [image.grid], 10**9) < 0.1
    with pytest.raises(ConfigError):
        parse_size("5x")
