"""examples/yoco/compare.py shows that mask = compact, and that both differ from off."""

import importlib.util
import os
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from deepinfer.checkpoint.reader import Checkpoint
from deepinfer.model.loading import load_weights
from deepinfer.model.model import InferenceModel
from deepinfer.reference.loading import load_reference
from deepinfer.text.engram_classes import engram_classes
from deepinfer.text.tokenizer import Tokenizer

DIRECTORY = Path(__file__).parents[1] / "examples" / "yoco"
Output = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("yoco_compare", DIRECTORY / "compare.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def rows(text: str) -> list[dict[str, str]]:
    """The lines of the tables, by column."""
    names = ("mode", "seconds", "of off", "worst to mask", "worst to off", "last to off", "as mask", "as off")
    lines = re.findall(r"^  (compact|mask|off) +" + r" +".join([r"(\S+)"] * 5) + r" +(.+?) {2,}(.+)$", text, re.M)
    return [dict(zip(names, line, strict=True)) for line in lines]


def check(table: list[dict[str, str]]) -> None:
    """What each table has to show."""
    assert [row["mode"] for row in table] == ["compact", "mask", "off"] * (len(table) // 3)
    for row in table:
        if row["mode"] == "off":
            assert float(row["worst to mask"]) > 1e-2
            continue
        assert float(row["worst to mask"]) < 1e-3
        assert float(row["worst to off"]) > 1e-2
        assert row["as mask"].startswith("all ")


def test_mask_and_compact_agree_and_off_does_not(example: ModuleType, tiny_checkpoint: Path, capsys: Output) -> None:
    arguments = ["--model", str(tiny_checkpoint), "--lengths", "60", "90", "--tokens", "6", "--repeats", "1"]
    assert example.main(arguments) == 0
    out = capsys.readouterr().out
    assert "60 prompt tokens; compared: logits of the last 28 rows" in out
    table = rows(out)
    assert len(table) == 6
    check(table)
    assert {row["as mask"] for row in table if row["mode"] != "off"} == {"all 6"}


@pytest.mark.slow
def test_the_bundled_checkpoint(example: ModuleType, capsys: Output) -> None:
    assert example.main(["--lengths", "260", "--tokens", "8", "--repeats", "1"]) == 0
    table = rows(capsys.readouterr().out)
    assert len(table) == 3
    check(table)


@pytest.mark.parametrize("mode", ["compact", "mask", "off"])
def test_the_logits_are_the_reference_s(example: ModuleType, tiny_checkpoint: Path, mode: str) -> None:
    checkpoint, classes = Checkpoint(tiny_checkpoint), engram_classes(Tokenizer.from_file(tiny_checkpoint))
    model = InferenceModel(checkpoint.config, load_weights(checkpoint), classes)
    ids = list(range(3, 50))
    made = example.suffix_logits(model, ids, 28, mode)
    start = None if mode == "off" else torch.tensor([len(ids) - 28])
    with torch.inference_mode():
        wanted = load_reference(checkpoint, classes)(torch.tensor([ids]), replay_start=start).logits[0, -28:]
    assert example.differences(made, wanted).max() < 1e-3


def test_the_environment_is_left_as_it_was(
    example: ModuleType, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert example.VARIABLE not in os.environ
    example.engines(tiny_checkpoint)
    assert example.VARIABLE not in os.environ
    monkeypatch.setenv(example.VARIABLE, "mask")
    example.engines(tiny_checkpoint)
    assert os.environ[example.VARIABLE] == "mask"


def test_equal_tells_where_tokens_part(example: ModuleType) -> None:
    assert example.equal((1, 2, 3), (1, 2, 3)) == "all 3"
    assert example.equal((1, 2, 3), (1, 5, 3)) == "1 of 3"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--lengths", "28"], "a length is 28; it takes more than 28 tokens"),
        (["--lengths", "99999999"], "a length is 99999999"),
        (["--model", "/no/such/model"], "/no/such/model"),
    ],
    ids=["too short", "too long", "no model"],
)
def test_bad_arguments_are_one_line(
    example: ModuleType, tiny_checkpoint: Path, capsys: Output, arguments: list[str], words: str
) -> None:
    assert example.main(["--model", str(tiny_checkpoint), *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("error: ")
    assert words in shown.err
    assert shown.err.count("\n") == 1


def test_the_readme_shows_a_real_run() -> None:
    text = (DIRECTORY / "README.md").read_text(encoding="utf-8")
    table = rows(text)
    assert len(table) == 9
    check(table)
    heads = [line for line in text.splitlines() if line.startswith("  mode ")]
    assert len(heads) == 3
    assert "examples/yoco/compare.py" in text
