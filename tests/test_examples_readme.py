"""The README's Python example runs as it stands."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_the_python_example_of_the_readme_runs(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DEEPINFER_HF_MODEL_DIR", str(tiny_checkpoint))
    monkeypatch.chdir(ROOT)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 1
    exec(compile(blocks[0].replace("max_tokens=100", "max_tokens=8"), "README.md", "exec"), {})
    assert len(capsys.readouterr().out.splitlines()) >= 4
