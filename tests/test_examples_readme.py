"""What the README says holds: its Python examples run, its commands parse, its table of settings is complete."""

import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest

from deepinfer.cli.main import build_parser
from deepinfer.config.engine import EngineConfig

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_python_examples_of_the_readme_run(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DEEPINFER_HF_MODEL_DIR", str(tiny_checkpoint))
    monkeypatch.chdir(ROOT)
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names: dict[str, object] = {}  # each block goes on where the one before it ended
    for block in blocks:
        exec(compile(re.sub(r"max_tokens=\d+", "max_tokens=8", block), "README.md", "exec"), names)
        assert len(capsys.readouterr().out.splitlines()) >= 1


def test_the_commands_of_the_readme_parse() -> None:
    commands = re.findall(r"^deepinfer (.*?)(?: +#.*)?$", README, re.MULTILINE)
    assert {shlex.split(command)[0] for command in commands} == {"generate", "info", "memory"}
    for command in commands:
        build_parser().parse_args(shlex.split(command))


def test_the_table_of_settings_has_every_setting_with_its_default() -> None:
    section = README.split("### Settings of the engine")[1].split("###")[0]
    rows = dict(re.findall(r"^\| (`.*?) \| (.*?) \|", section, re.MULTILINE))
    names = [name.strip("` ") for row in rows for name in row.split(",")]
    assert sorted(names) == sorted(field.name for field in fields(EngineConfig))
    for row, default in rows.items():
        field = next(field for field in fields(EngineConfig) if row.startswith(f"`{field.name}`"))
        assert default.split(",")[0].strip("`") == str(field.default)


def test_the_output_of_make_run_is_that_of_the_bundled_prompts() -> None:
    shown = README.split("output of make run: begin")[1].split("output of make run: end")[0]
    prompts = (ROOT / "examples" / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    assert re.findall(r"^\[(\d+)/(\d+)\]", shown, re.MULTILINE) == [
        (str(number), str(len(prompts))) for number in range(1, len(prompts) + 1)
    ]
    assert f"requests   {len(prompts)} finished, 0 failed" in shown
