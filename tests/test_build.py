"""build.sh, Makefile and .ci/run with stand-in interpreters: what is installed, when nothing is, and what is refused.

A stand-in Python notes its arguments, makes `.venv` by copying itself and does nothing for pip; the code that build.sh
asks it to run goes to the real interpreter, which finds the fake torch that a test puts on its path.
"""

import os
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TOOLS = ("bash", "sh", "env", "cat", "cut", "sha256sum", "dirname", "basename", "mkdir", "cp", "rm", "make")
XGRAMMAR = "xgrammar>=0.2.9,<0.3"
ON_CPU = ["apache-tvm-ffi>=0.1.11 transformers>=4.38 pydantic>=2", f"--no-deps {XGRAMMAR}"]
STAND_IN = f"""#!/bin/sh
[ "$1" = -c ] || [ "$1" = - ] || echo "$(basename "$0") $*" >>"$LOG"
case "$1" in
    --version) echo "Python 3.11.9" ;;
    -c | -) [ -z "$OLD" ] && PYTHONPATH="$SITE" exec {sys._base_executable} -S "$@" ;;
    -m)
        case "$2 $3" in
            "venv "*) mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
            "pip install") exit "${{PIP_STATUS:-0}}" ;;
        esac
        ;;
esac
"""


@dataclass
class Sandbox:
    """A copy of the build files in a directory of its own, with a PATH of nothing but stand-ins and basic tools."""

    root: Path

    @property
    def log(self) -> list[str]:
        path = self.root / "log"
        return path.read_text().splitlines() if path.exists() else []

    @property
    def installed(self) -> list[str]:
        """What pip was told to install, without its options."""
        calls = [line for line in self.log if "-m pip install" in line]
        return [line.split("--disable-pip-version-check ")[1] for line in calls]

    def add_python(self, name: str) -> Path:
        path = self.root / "bin" / name
        path.write_text(STAND_IN)
        path.chmod(0o755)
        return path

    def add_module(self, name: str, code: str) -> None:
        (self.root / "site" / f"{name}.py").write_text(code)

    def run(self, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        places = {"PATH": str(self.root / "bin"), "LOG": str(self.root / "log"), "SITE": str(self.root / "site")}
        environment = {"HOME": str(self.root), **places, **variables}
        return subprocess.run(
            command or ("./build.sh",), cwd=self.root, env=environment, capture_output=True, text=True, timeout=60
        )


@pytest.fixture
def sandbox(tmp_path: Path) -> Sandbox:
    for name in ("bin", "site", ".ci"):
        (tmp_path / name).mkdir()
    for name in ("build.sh", "pyproject.toml", "Makefile", ".ci/run"):
        shutil.copy(ROOT / name, tmp_path / name)
    for tool in TOOLS:
        found = shutil.which(tool)
        assert found is not None
        (tmp_path / "bin" / tool).symlink_to(found)
    return Sandbox(tmp_path)


@pytest.fixture
def cpu(sandbox: Sandbox) -> Sandbox:
    sandbox.add_python("python3.11")
    return sandbox


@pytest.mark.parametrize("accelerator", ["tpu", "CPU", "cpu nvidia"])
def test_an_unknown_accelerator_is_refused_and_nothing_touched(cpu: Sandbox, accelerator: str) -> None:
    before = sorted(cpu.root.rglob("*"))
    result = cpu.run(DEEPINFER_ACCELERATOR=accelerator)
    assert result.returncode == 2
    assert f"DEEPINFER_ACCELERATOR={accelerator} is unknown" in result.stderr
    assert "cpu (the default), nvidia or ascend" in result.stderr
    assert sorted(cpu.root.rglob("*")) == before


def test_an_unknown_argument_is_refused(cpu: Sandbox) -> None:
    result = cpu.run("./build.sh", "tests")
    assert (result.returncode, cpu.log) == (2, [])
    assert "'tests' is unknown" in result.stderr


def test_the_first_build_pins_torch_and_the_second_does_nothing(cpu: Sandbox) -> None:
    assert cpu.run().returncode == 0
    assert cpu.installed == ["torch==2.13.0", "--editable .", *ON_CPU]
    assert "python3.11 -m venv .venv" in cpu.log
    done = cpu.log
    again = cpu.run()
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")
    assert cpu.log == done


def test_the_test_extra_includes_the_rest(cpu: Sandbox) -> None:
    assert cpu.run("./build.sh", "test").returncode == 0
    assert cpu.installed == ["torch==2.13.0", "--editable .[test]", *ON_CPU]
    assert cpu.run().returncode == 0
    assert len(cpu.installed) == 4
    (cpu.root / ".venv" / ".deepinfer-test").unlink()
    assert cpu.run("./build.sh", "test").returncode == 0
    assert len(cpu.installed) == 8


@pytest.mark.parametrize("file", ["pyproject.toml", "build.sh"])
def test_a_change_of_what_decides_the_build_builds_again(cpu: Sandbox, file: str) -> None:
    cpu.run()
    path = cpu.root / file
    path.write_text(path.read_text() + "\n# changed\n")
    assert cpu.run().returncode == 0
    assert cpu.installed == 2 * ["torch==2.13.0", "--editable .", *ON_CPU]
    assert sum("-m venv" in line for line in cpu.log) == 1


def test_a_failed_install_fails_the_build_and_is_tried_again(cpu: Sandbox) -> None:
    assert cpu.run(PIP_STATUS="1").returncode == 1
    assert cpu.installed == ["torch==2.13.0"]
    assert cpu.run().returncode == 0
    assert cpu.installed[1:] == ["torch==2.13.0", "--editable .", *ON_CPU]


def test_without_a_python_it_says_what_is_missing(sandbox: Sandbox) -> None:
    result = sandbox.run()
    assert result.returncode == 2
    assert "no Python >= 3.11 found (tried python3.11, python3.12, python3)" in result.stderr
    assert "PYTHON=" in result.stderr
    assert not (sandbox.root / ".venv").exists()


def test_an_old_python_is_passed_over(cpu: Sandbox) -> None:
    result = cpu.run(OLD="1")
    assert result.returncode == 2
    assert "no Python >= 3.11 found" in result.stderr


def test_the_named_python_is_taken(cpu: Sandbox) -> None:
    chosen = cpu.add_python("my-python")
    assert cpu.run(PYTHON=str(chosen)).returncode == 0
    assert cpu.log[1] == "my-python -m venv .venv"


def test_a_broken_venv_is_not_built_upon(cpu: Sandbox) -> None:
    (cpu.root / ".venv").mkdir()
    result = cpu.run()
    assert (result.returncode, cpu.installed) == (2, [])
    assert "remove it (rm -r .venv)" in result.stderr


def torch_module(version: str, cuda: str | None) -> str:
    return f"class version:\n    cuda = {cuda!r}\n__version__ = {version!r}\n"


@pytest.mark.parametrize("version", ["2.11.0+cu130", "2.13.0", "3.0.0a0+git"])
def test_nvidia_keeps_the_torch_that_is_there(sandbox: Sandbox, version: str) -> None:
    sandbox.add_python("python3.12")
    sandbox.add_module("torch", torch_module(version, "13.0"))
    result = sandbox.run(DEEPINFER_ACCELERATOR="nvidia")
    assert result.returncode == 0, result.stderr
    assert sandbox.installed == ["--editable .", XGRAMMAR]
    assert "python3.12 -m venv --system-site-packages .venv" in sandbox.log


@pytest.mark.parametrize(("version", "cuda"), [("2.9.1+cu128", "12.8"), ("2.13.0+cpu", None)])
def test_nvidia_installs_torch_where_none_will_do_and_checks_what_came(
    sandbox: Sandbox, version: str, cuda: str | None
) -> None:
    sandbox.add_python("python3.12")
    sandbox.add_module("torch", torch_module(version, cuda))
    result = sandbox.run(DEEPINFER_ACCELERATOR="nvidia")
    assert sandbox.installed == ["torch>=2.11"]
    assert "-m venv .venv" in " ".join(sandbox.log)
    assert result.returncode == 2  # the stand-in's pip brought nothing better
    assert "no CUDA build >= 2.11" in result.stderr


def test_another_accelerator_builds_again(sandbox: Sandbox) -> None:
    sandbox.add_python("python3.11")
    sandbox.add_module("torch", torch_module("2.13.0", "13.0"))
    assert sandbox.run().returncode == 0
    assert sandbox.run(DEEPINFER_ACCELERATOR="nvidia").returncode == 0
    assert sandbox.installed == ["torch==2.13.0", "--editable .", *ON_CPU, "--editable .", XGRAMMAR]


def test_ascend_says_that_it_was_never_run_and_wants_torch_npu(sandbox: Sandbox) -> None:
    sandbox.add_python("python3.11")
    result = sandbox.run(DEEPINFER_ACCELERATOR="ascend")
    assert result.returncode == 2
    assert "never been run on an Ascend device" in result.stdout
    assert "torch_npu" in result.stderr
    sandbox.add_module("torch", torch_module("2.11.0", None))
    sandbox.add_module("torch_npu", "")
    assert sandbox.run(DEEPINFER_ACCELERATOR="ascend").returncode == 0
    assert sandbox.installed == ["--editable .", XGRAMMAR]


@pytest.mark.parametrize("target", ["run", "test"])
def test_make_stops_where_the_build_does(cpu: Sandbox, target: str) -> None:
    result = cpu.run("make", target, DEEPINFER_ACCELERATOR="tpu")
    assert result.returncode == 2
    assert "DEEPINFER_ACCELERATOR=tpu is unknown" in result.stderr
    assert cpu.log == []


def test_make_run_installs_and_runs_the_example(cpu: Sandbox) -> None:
    assert cpu.run("make", "run", "ARGS=--max_tokens 5").returncode == 0
    assert cpu.installed == ["torch==2.13.0", "--editable .", *ON_CPU]
    assert cpu.log[-1] == "python examples/offline_inference.py --max_tokens 5"


def test_make_test_installs_and_runs_every_check(cpu: Sandbox) -> None:
    assert cpu.run("make", "test").returncode == 0
    assert cpu.installed == ["torch==2.13.0", "--editable .[test]", *ON_CPU]
    checks = [line for line in cpu.log if line.startswith("python -m") and " pip " not in line]
    assert checks == [
        "python -m ruff check .",
        "python -m ruff format --check .",
        "python -m mypy",
        "python -m pytest -n 2",
    ]


@pytest.mark.parametrize("status", [0, 3])
def test_ci_starts_from_no_venv_and_ends_as_the_tests_do(cpu: Sandbox, status: int) -> None:
    (cpu.root / ".venv").mkdir()
    make = cpu.root / "bin" / "make"
    make.unlink()
    make.write_text(f'#!/bin/sh\n[ ! -e .venv ] && echo "make $*" && exit {status}\n')
    make.chmod(0o755)
    result = cpu.run("bash", ".ci/run")
    assert (result.stdout, result.returncode) == ("make test\n", status)


@pytest.mark.parametrize("path", ["build.sh", ".ci/run"])
def test_scripts_can_be_executed(path: str) -> None:
    assert os.access(ROOT / path, os.X_OK)


def test_build_and_package_ask_for_the_same_xgrammar() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["structured"] == [XGRAMMAR]
