"""dspark_calibration.json: written, read, missing and broken."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.core.errors import CheckpointError
from deepinfer.speculative.calibration import FILE, Calibration


def write(directory: Path, data: Any) -> None:
    (directory / FILE).write_text(data if isinstance(data, str) else json.dumps(data), encoding="utf-8")


@given(
    temperatures=st.lists(st.floats(0.25, 4), min_size=1, max_size=8).map(tuple),
    dataset=st.text(),
    samples=st.integers(0, 10**9),
    ece=st.none() | st.floats(0, 1),
)
def test_what_is_saved_is_loaded(
    tmp_path_factory: pytest.TempPathFactory, temperatures: tuple[float, ...], dataset: str, samples: int, ece: float
) -> None:
    directory = tmp_path_factory.mktemp("checkpoint")
    saved = Calibration(temperatures, dataset.encode("utf-8", "ignore").decode(), samples, ece, ece)
    assert saved.save(directory) == directory / FILE
    assert Calibration.load(directory, len(temperatures)) == saved


def test_without_a_file_confidence_stays_as_it_is(tmp_path: Path) -> None:
    assert Calibration.load(tmp_path, 5) == Calibration.identity(5) == Calibration((1.0,) * 5)


def test_temperatures_alone_will_do(tmp_path: Path) -> None:
    write(tmp_path, {"temperatures": [1, 2.5]})
    assert Calibration.load(tmp_path, 2) == Calibration((1.0, 2.5))


@pytest.mark.parametrize(
    "data",
    [
        "",
        "{",
        "\ud800".encode("utf-8", "surrogatepass").decode("latin-1"),
        [1, 1, 1],
        None,
        {},
        {"temperatures": 1},
        {"temperatures": []},
        {"temperatures": [1, 1]},
        {"temperatures": [1, 1, 1, 1]},
        {"temperatures": [1, 0, 1]},
        {"temperatures": [1, -1, 1]},
        {"temperatures": [1, None, 1]},
        {"temperatures": [1, True, 1]},
        {"temperatures": [1, "1", 1]},
        {"temperatures": [1, 10**400, 1]},
        '{"temperatures": [1, NaN, 1]}',
        '{"temperatures": [1, Infinity, 1]}',
    ],
    ids=lambda data: repr(data)[:40],
)
def test_a_broken_file_is_named_with_what_it_takes(tmp_path: Path, data: Any) -> None:
    write(tmp_path, data)
    with pytest.raises(CheckpointError, match="3 positive numbers") as caught:
        Calibration.load(tmp_path, 3)
    assert str(tmp_path / FILE) in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "takes"),
    [
        ("dataset", 3, "text"),
        ("samples", 2.5, "a whole number"),
        ("samples", True, "a whole number"),
        ("ece_before", "low", "a number or null"),
        ("ece_after", [0.1], "a number or null"),
    ],
)
def test_a_broken_note_is_named(tmp_path: Path, key: str, value: Any, takes: str) -> None:
    write(tmp_path, {"temperatures": [1, 1, 1], key: value})
    with pytest.raises(CheckpointError, match=f"{key} is .* takes {takes}") as caught:
        Calibration.load(tmp_path, 3)
    assert str(tmp_path / FILE) in str(caught.value)


def test_a_directory_in_its_place_is_named(tmp_path: Path) -> None:
    (tmp_path / FILE).mkdir()
    with pytest.raises(CheckpointError, match="cannot be read"):
        Calibration.load(tmp_path, 3)
