"""What several test files share: where the golden data lies, a small chat model, a clean environment."""

import os
from pathlib import Path

import pytest
import tiny
import torch
from hypothesis import settings

HERE = Path(__file__).parent

# Where there is no GPU, Triton's kernels run in its interpreter; it has to know before anybody imports them.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A machine that does other things, too, must not fail a test for its speed.
settings.register_profile("patient", deadline=None, max_examples=40)  # two cores, ten minutes for everything
settings.load_profile("patient")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--golden", type=Path, default=HERE / "golden", help="directory of golden data")


@pytest.fixture(autouse=True)
def no_project_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """A developer's own settings must not decide whether a test passes."""
    for name in list(os.environ):
        if name.startswith(("DEEPINFER_", "EVAL_JUDGE_")):
            monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def golden(pytestconfig: pytest.Config) -> Path:
    directory: Path = pytestconfig.getoption("golden")
    return directory


@pytest.fixture(scope="session")
def golden_checkpoint(golden: Path) -> Path:
    return golden / "checkpoint"


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of four layers whose vocabulary holds the chat protocol; it talks nonsense in the right form."""
    return tiny.write(tmp_path_factory.mktemp("tiny") / "checkpoint")
