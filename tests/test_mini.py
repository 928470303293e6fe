"""The bundled checkpoint keeps what was measured on it: tests/mini_bounds.json, written by eval/mini.py.

`full` is the table of `python eval/mini.py --json`, `quick` that of `python eval/mini.py --quick --json`, which is
measured again here. Machines round differently, so a near tie may cost an exercise; the slack allows for one.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from deepinfer.checkpoint.locate import bundled_checkpoint
from deepinfer.config.model import ModelConfig
from deepinfer.speculative.calibration import Calibration
from eval import mini, rows
from eval.table import Row

BOUNDS = json.loads((Path(__file__).parent / "mini_bounds.json").read_text("utf-8"))
KEYS = (*rows.TASKS, "bits_per_byte", "accepted_length", "calibration_error", "agreement")
SLACK = {
    **{task: 1 / count for task, count in mini.QUICK.items()},
    "bits_per_byte": 0.01,
    "accepted_length": 0.1,
    "calibration_error": 0.01,
    "agreement": 0.01,
}


def stored(table: str) -> dict[str, dict[str, Any]]:
    return {row["key"]: row for row in BOUNDS[table]["rows"]}


@pytest.fixture(scope="module")
def measured() -> dict[str, Row]:
    options = mini.parse_arguments(["--quick", "--quiet", "--seed", str(BOUNDS["quick"]["seed"])])
    return {row.key: row for row in mini.measure(options, bundled_checkpoint())}


@pytest.mark.parametrize("key", KEYS)
def test_the_full_table_keeps_every_bound(key: str) -> None:
    row = stored("full")[key]
    assert Row(key, row["name"], row["value"], row["bound"], row["at_least"]).passed


def test_the_full_table_was_held_to_the_bounds_that_stand_in_the_code() -> None:
    bounds = {task: bound for task, (_, bound) in rows.TASKS.items()}
    bounds |= {
        "bits_per_byte": rows.BITS_PER_BYTE,
        "accepted_length": rows.ACCEPTED_LENGTH,
        "calibration_error": rows.CALIBRATION_ERROR,
        "agreement": rows.AGREEMENT,
    }
    assert {key: row["bound"] for key, row in stored("full").items()} == bounds
    assert set(bounds) == set(KEYS)


@pytest.mark.slow
@pytest.mark.parametrize("key", KEYS)
def test_a_quick_measure_is_as_good_as_it_was(key: str, measured: dict[str, Row]) -> None:
    before, now = stored("quick")[key]["value"], measured[key].value
    worse = before - now if measured[key].at_least else now - before
    assert worse <= SLACK[key] + 1e-9, f"{measured[key].name}: {now}, was {before}"


def test_the_calibration_was_fitted_and_helped() -> None:
    config = ModelConfig.from_file(bundled_checkpoint() / "config.json")
    calibration = Calibration.load(bundled_checkpoint(), config.dspark_block_size)
    assert calibration.samples > 500
    assert calibration.ece_after is not None
    assert calibration.ece_before is not None
    assert calibration.ece_after <= calibration.ece_before


def test_the_checkpoint_can_travel() -> None:
    sizes = [path.stat().st_size for path in bundled_checkpoint().iterdir()]
    assert sum(sizes) <= 32_000_000
    assert max(sizes) <= 16_000_000
