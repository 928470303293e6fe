"""examples/offline_inference.py as a user runs it: help, answers, JSON, and one line for each kind of bad input."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from deepinfer import LLM, SamplingParams
from deepinfer.text.images import load_image

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "examples" / "offline_inference.py"
Main = Callable[[list[str]], int]


def command(*arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    line = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, env=environment, timeout=120, check=False)


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("offline_inference", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def lines_file(directory: Path, *lines: Any) -> Path:
    path = directory / "prompts.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return path


def test_help_names_every_option_and_variable() -> None:
    result = command("--help")
    assert result.returncode == 0
    options = ("--model", "--prompts", "--json", "--max_tokens", "--temperature", "--seed", "--no-async")
    for word in (*options, "DEEPINFER_HF_MODEL_DIR"):
        assert word in result.stdout


def test_a_run_on_the_golden_checkpoint_answers_what_the_api_answers(golden_checkpoint: Path, tmp_path: Path) -> None:
    prompts = lines_file(tmp_path, {"prompt": "The first"}, {"prompt": [5, 6, 7]})
    out = tmp_path / "answers.json"
    result = command("--model", golden_checkpoint, "--prompts", prompts, "--json", out, "--max_tokens", "6")
    assert result.returncode == 0, result.stderr
    assert "The first" in result.stdout
    assert "\n2 answers in " in result.stdout
    assert "\nrequests   2 finished, 0 failed" in result.stdout
    assert "2/2" in result.stderr  # the progress bar
    record = json.loads(out.read_text(encoding="utf-8"))
    outputs = LLM(golden_checkpoint).generate(["The first", [5, 6, 7]], SamplingParams(0, 6), use_tqdm=False)
    assert [entry["token_ids"] for entry in record["outputs"]] == [list(output.token_ids) for output in outputs]
    assert [entry["text"] for entry in record["outputs"]] == [output.text for output in outputs]
    assert [entry["prompt_tokens"] for entry in record["outputs"]] == [len(o.prompt_token_ids) for o in outputs]
    assert record["tokens_per_second"] > 0


def test_the_bundled_prompts_are_all_served(example: ModuleType, tiny_checkpoint: Path, tmp_path: Path) -> None:
    """On a random model with the chat vocabulary: text, chats and the image file all go through."""
    out = tmp_path / "answers.json"
    arguments = ["--model", str(tiny_checkpoint), "--max_tokens", "4", "--json", str(out)]
    assert example.main(arguments) == 0
    record = json.loads(out.read_text(encoding="utf-8"))
    bundled = (ROOT / "examples" / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(record["outputs"]) == len(bundled)
    assert all(entry["error"] is None for entry in record["outputs"])
    kinds = {("messages" in line, '"image"' in line, '"thinking": false' in line) for line in bundled}
    assert kinds == {(False, False, False), (True, False, True), (True, False, False), (True, True, True)}


def test_the_plain_loop_gives_the_same_answers(example: ModuleType, tiny_checkpoint: Path, tmp_path: Path) -> None:
    arguments = ["--model", str(tiny_checkpoint), "--max_tokens", "6", "--json"]
    assert example.main([*arguments, str(tmp_path / "ahead.json")]) == 0
    assert example.main([*arguments, str(tmp_path / "plain.json"), "--no-async"]) == 0
    ahead, plain = (json.loads((tmp_path / name).read_text(encoding="utf-8")) for name in ("ahead.json", "plain.json"))
    assert ahead["outputs"] == plain["outputs"]


def test_the_option_chooses_the_loop(
    example: ModuleType, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []

    class Watched(LLM):
        def __init__(self, model: str, **settings: bool) -> None:
            seen.append(settings["asynchronous"])
            super().__init__(model, **settings)

    monkeypatch.setattr(example, "LLM", Watched)
    for option in ([], ["--no-async"]):
        assert example.main(["--model", str(tiny_checkpoint), "--max_tokens", "1", *option]) == 0
    assert seen == [True, False]


def test_the_bundled_picture_can_be_read() -> None:
    assert load_image(ROOT / "examples" / "number.png").size == (96, 32)


def test_one_seed_repeats_a_hot_run(example: ModuleType, tiny_checkpoint: Path, tmp_path: Path) -> None:
    prompts = lines_file(tmp_path, {"prompt": "Once"})

    def tokens(seed: str) -> list[int]:
        arguments = ["--model", str(tiny_checkpoint), "--prompts", str(prompts), "--json", str(tmp_path / "out.json")]
        assert example.main([*arguments, "--temperature", "1.0", "--seed", seed, "--max_tokens", "12"]) == 0
        answers: list[int] = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))["outputs"][0]["token_ids"]
        return answers

    assert tokens("3") == tokens("3")
    assert tokens("3") != tokens("4")


def test_a_bad_prompt_is_told_of_and_the_others_are_answered(
    example: ModuleType, tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = {"role": "user", "content": [{"type": "image", "image": "absent.png"}]}
    prompts = lines_file(tmp_path, {"prompt": ""}, {"messages": [picture]}, {"prompt": "good"})
    assert example.main(["--model", str(tiny_checkpoint), "--prompts", str(prompts), "--max_tokens", "3"]) == 2
    shown = capsys.readouterr()
    assert "error: the prompt is empty" in shown.out
    assert str(tmp_path / "absent.png") in shown.out
    assert "1 answers" in shown.out
    assert "error: 2 of 3 prompts could not be served" in shown.err


def one_line_error(capsys: pytest.CaptureFixture[str]) -> str:
    shown = capsys.readouterr()
    assert shown.out == ""
    lines = shown.err.strip().splitlines()
    assert len(lines) == 1, shown.err
    return lines[0]


BAD_LINES: dict[str, tuple[str, list[str]]] = {
    "no JSON": ("not json", ["line 2", "is not JSON"]),
    "a list": ("[1]", ["line 2", "exactly one of prompt and messages"]),
    "both kinds": ('{"prompt": "a", "messages": []}', ["line 2", "exactly one of prompt and messages"]),
    "neither kind": ('{"thinking": true}', ["line 2", "exactly one of prompt and messages"]),
    "unknown key": ('{"prompt": "a", "max_tokens": 3}', ["line 2", "unknown key 'max_tokens'"]),
    "thinking a word": ('{"messages": [{"role": "user", "content": "a"}], "thinking": "no"}', ["line 2", "thinking"]),
    "prompt a number": ('{"prompt": 5}', ["line 2", "prompt takes text or a list of token ids"]),
    "messages a text": ('{"messages": "hi"}', ["line 2", "messages takes a list of objects"]),
    "no messages": ('{"messages": []}', ["line 2", "messages takes a list of objects"]),
}


@pytest.mark.parametrize("case", BAD_LINES)
def test_a_bad_line_is_named(
    example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    line, words = BAD_LINES[case]
    prompts = lines_file(tmp_path, {"prompt": "good"}, line)
    assert example.main(["--prompts", str(prompts)]) == 2
    message = one_line_error(capsys)
    assert all(word in message for word in [str(prompts), *words]), message


def test_prompts_files_that_are_absent_or_empty(
    example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert example.main(["--prompts", str(tmp_path / "absent.jsonl")]) == 2
    assert "absent.jsonl cannot be read" in one_line_error(capsys)
    assert example.main(["--prompts", str(lines_file(tmp_path, "", ""))]) == 2
    assert "holds no prompts" in one_line_error(capsys)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--max_tokens", "0"], "max_tokens is 0; it takes a whole number >= 1"),
        (["--temperature", "-1"], "temperature is -1.0; it takes a finite number >= 0"),
        (["--seed", "-1"], "seq_seed is -1"),
        (["--json", "/no/such/place/out.json"], "/no/such/place/out.json cannot be written"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_bad_options(example: ModuleType, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    assert example.main(arguments) == 2
    assert words in one_line_error(capsys)


def test_no_checkpoint_and_half_a_checkpoint_end_with_one_line(tiny_checkpoint: Path, tmp_path: Path) -> None:
    half = shutil.copytree(tiny_checkpoint, tmp_path / "half")
    for shard in half.glob("*.safetensors"):
        shard.unlink()
    for directory, word in ((tmp_path / "nowhere", "nowhere"), (half, "safetensors")):
        result = command("--model", directory)
        assert result.returncode == 2
        assert result.stderr.startswith("error: ")
        assert word in result.stderr
        assert len(result.stderr.strip().splitlines()) == 1
        assert result.stdout == ""


def test_the_environment_names_the_checkpoint(golden_checkpoint: Path, tmp_path: Path) -> None:
    prompts = lines_file(tmp_path, {"prompt": "The first"})
    result = command("--prompts", prompts, "--max_tokens", "2", DEEPINFER_HF_MODEL_DIR=str(golden_checkpoint))
    assert result.returncode == 0, result.stderr
    assert str(golden_checkpoint) in result.stdout
