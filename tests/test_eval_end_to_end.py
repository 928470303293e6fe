"""The sample set with the bundled checkpoint: generate, kill, resume, score by rule, score by a judge, agree."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from eval_cases import lines
from judge_server import JudgeServer, contains

from deepinfer import LLM
from eval import generate, score
from eval.harness.launch import rank_settings
from eval.harness.run_directory import RunDirectory

ROOT = Path(__file__).parents[1]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
SAMPLE = ("--data", "sample", "--prompt", "bare", "--temperature", "0.4", "--max-tokens", "70")
AIME = ("--bench", "aime", *SAMPLE, "--samples", "2", "--max-requests", "8")


def command(*arguments: object) -> list[str]:
    return [sys.executable, str(ROOT / "eval" / "generate.py"), *map(str, arguments)]


@pytest.fixture(scope="module")
def mini() -> LLM:
    return LLM(ROOT / "checkpoints" / "mini")


@pytest.fixture
def in_process(mini: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of eval/generate.py in this process share one loaded model."""
    monkeypatch.setattr(generate, "LLM", lambda model, **settings: mini)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that was killed between two samples, its last line torn."""
    out = tmp_path_factory.mktemp("killed") / "aime"
    with subprocess.Popen(command(*AIME, "--out-dir", out), env=ENVIRONMENT, stderr=subprocess.PIPE) as process:
        path = out / "rollouts.jsonl"
        patience = time.monotonic() + 400
        while not (path.is_file() and path.read_bytes().count(b"\n") >= 5):
            assert process.poll() is None, process.stderr and process.stderr.read()
            assert time.monotonic() < patience
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    whole = path.read_bytes()
    assert 5 <= whole.count(b"\n") < 24, "killed in the middle"
    path.write_bytes(whole + whole.splitlines()[-1][:40])
    return out


@pytest.mark.usefixtures("in_process")
def test_a_killed_run_goes_on_and_is_scored(
    killed: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = lines(killed / "rollouts.jsonl")[:-1]
    assert run_score(killed, "rule") == 1, "an unfinished run can be scored, and says that it is one"
    assert summary(killed)["pass_at_1"] is None
    assert generate.main([*AIME, "--out-dir", str(killed)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(killed)
    after = lines(killed / "rollouts.jsonl")
    assert after[: len(before)] == before, "what was there stays as it was"
    keys = [(record["question"], record["sample"]) for record in map(json.loads, after)]
    assert sorted(keys) == sorted((f"sum-{question}", sample) for question in range(12) for sample in range(2))
    assert run_score(killed, "rule") == 0
    by_rule = summary(killed)
    assert by_rule["pass_at_1"] >= 0.75
    assert by_rule["samples"] == by_rule["generated"] == by_rule["judged"] == 24
    judged_by_model(killed, by_rule, monkeypatch)
    assert (killed / "accuracy.png").stat().st_size > 10_000


def judged_by_model(run: Path, by_rule: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A judge that fails at first, and that thinks otherwise about one question."""

    def opinion(answer: str, response: str) -> bool:
        return contains(answer, response.rstrip("}.")) != (answer == "131")

    with JudgeServer(["busy", "half"], always="broken", opinion=opinion) as server:
        monkeypatch.setenv("EVAL_JUDGE_BASE_URL", server.url)
        monkeypatch.setenv("EVAL_JUDGE_MODEL", "judge")
        hasty = ("--attempts", "2", "--pause", "0.01")
        assert run_score(run, "llm", *hasty) == 1
        assert summary(run)["coverage_complete"] is False
        assert summary(run)["judges"]["rule"]["pass_at_1"] == by_rule["pass_at_1"]
        server.always = "good"
        assert run_score(run, "llm", *hasty) == 0
    found = summary(run)
    assert (found["judge"], found["coverage_complete"]) == ("llm", True)
    agreed = found["agreement"]["llm and rule"]
    assert agreed["samples"] == 24
    assert {entry["question"] for entry in agreed["differing"]} == {"sum-7"}
    assert agreed["equal"] == 22
    assert found["pass_at_1"] == pytest.approx(by_rule["pass_at_1"] - 1 / 12)


def run_score(out: Path, judge: str, *more: str) -> int:
    return score.main(["--out-dir", str(out), "--judge", judge, "--quiet", *more])


def summary(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "summary.json").read_text("utf-8"))
    return found


@pytest.mark.usefixtures("in_process")
def test_choices_and_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = (*SAMPLE[:-4], "--temperature", "0", "--max-tokens", "24", "--samples", "1", "--no-thinking", "--quiet")
    held = {"gpqa": ("--regex", "ANSWER: [A-D]"), "hle": ()}
    for bench, form in held.items():
        assert generate.main(["--bench", bench, *shared, *form, "--out-dir", str(tmp_path / bench)]) == 0
    assert run_score(tmp_path / "gpqa", "rule") == 0
    rollouts, _ = RunDirectory(tmp_path / "gpqa").rollouts()
    right = [rollout for rollout in rollouts.values() if rollout.text == f"ANSWER: {rollout.question[0]}"]
    found = summary(tmp_path / "gpqa")
    assert (found["judged"], found["correct"], found["pass_at_1"]) == (8, len(right), len(right) / 8)
    assert found["without_answer"] == 0
    assert len(right) >= 5
    assert run_score(tmp_path / "hle", "rule") == 2
    assert "no rule can judge; score it with --judge llm" in capsys.readouterr().err
    assert run_score(tmp_path / "hle", "llm") == 2
    assert "EVAL_JUDGE_BASE_URL is not set" in capsys.readouterr().err
    with JudgeServer() as server:
        monkeypatch.setenv("EVAL_JUDGE_BASE_URL", server.url)
        monkeypatch.setenv("EVAL_JUDGE_MODEL", "judge")
        assert run_score(tmp_path / "hle", "llm") == 0
        assert sum("came with a picture" in str(body["messages"]) for body in server.bodies) == 2
    assert summary(tmp_path / "hle")["correct"] >= 6
    records = map(json.loads, lines(tmp_path / "hle" / "verdicts-llm.jsonl"))
    verdicts = {record["question"]: record["correct"] for record in records}
    assert verdicts["picture-0"] or verdicts["picture-1"]


def test_equal_seeds_give_equal_samples(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """Alone or in a batch, in whatever order they were asked."""
    few = tmp_path / "few.jsonl"
    few.write_text("".join(line + "\n" for line in lines(ROOT / "eval" / "sample" / "aime.jsonl")[:3]), "utf-8")
    texts = []
    for samples, seed in ((2, 0), (1, 0), (2, 1)):
        out = tmp_path / f"{samples}-{seed}"
        options = ("--bench", "aime", "--data", few, "--questions", 3, "--prompt", "bare", "--max-tokens", 20)
        options += (
            "--samples",
            samples,
            "--seed",
            seed,
            "--model",
            tiny_checkpoint,
            "--no-thinking",
            "--quiet",
            "--out-dir",
            out,
        )
        assert generate.main(list(map(str, options))) == 0
        rollouts, _ = RunDirectory(out).rollouts()
        texts.append({key: (rollout.seed, rollout.text) for key, rollout in rollouts.items()})
    assert all(texts[0][key] == texts[1][key] for key in texts[1])
    assert all(texts[0][key] != texts[2][key] for key in texts[2])


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--temperature", "0.5"), "sampling.temperature was 0.4, not 0.5"),
        (("--samples", "3"), "samples was 2, not 3"),
        (("--seed", "1"), "seed was 0, not 1"),
        (("--prompt", "full"), 'prompt was "bare", not "full"'),
        (("--no-thinking",), "thinking was true, not false"),
    ],
)
def test_a_resume_with_other_parameters_is_refused(
    killed: Path, capsys: pytest.CaptureFixture[str], more: Sequence[str], message: str
) -> None:
    assert generate.main([*AIME, "--out-dir", str(killed), *more]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "take another --tag" in error


def test_another_model_or_setting_is_refused(
    killed: Path, tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert generate.main([*AIME, "--out-dir", str(killed), "--model", str(tiny_checkpoint)]) == 2
    assert "checkpoint was" in capsys.readouterr().err
    monkeypatch.setenv("DEEPINFER_BATCH_INVARIANT", "1")
    assert generate.main([*AIME, "--out-dir", str(killed)]) == 2
    assert "environment.batch_invariant was false, not true" in capsys.readouterr().err


def test_two_ranks_share_a_run(tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two processes started by `--dp`, then one that has nothing left to do; the model talks nonsense."""
    options = ("--bench", "gpqa", *SAMPLE[:-2], "--max-tokens", "8", "--samples", "3", "--no-thinking", "--quiet")
    options += ("--model", str(tiny_checkpoint), "--out-dir", str(tmp_path))
    assert generate.main([*options, "--dp", "2"]) == 0
    assert capsys.readouterr().out == f"{tmp_path}\n"
    files = [tmp_path / f"rollouts.{rank}-of-2.jsonl" for rank in range(2)]
    assert [len(lines(file)) for file in files] == [12, 12]
    rollouts, repeated = RunDirectory(tmp_path).rollouts()
    assert (len(rollouts), repeated) == (24, 0)
    assert generate.main(list(options)) == 0
    assert not (tmp_path / "rollouts.jsonl").read_bytes()
    assert run_score(tmp_path, "rule") == 0
    assert summary(tmp_path)["coverage_complete"] is True


def test_a_sample_that_failed_is_tried_again(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A question too long for the context fails every time, and stops no other."""
    path = tmp_path / "set.jsonl"
    records = [{"id": "long", "problem": "1+" * 5000, "answer": 1}, {"id": "good", "problem": "11+12=", "answer": 23}]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    options = ["--bench", "aime", "--data", str(path), "--questions", "2", "--samples", "1", "--prompt", "bare"]
    options += ["--max-tokens", "4", "--model", str(tiny_checkpoint), "--quiet", "--out-dir", str(tmp_path / "run")]
    for attempt in (1, 2):
        assert generate.main(options) == 1
        assert "1 samples failed; the same command tries them again" in capsys.readouterr().err
        assert len(lines(tmp_path / "run" / "rollouts.jsonl")) == 1 + attempt
    assert run_score(tmp_path / "run", "rule") == 1
    found = summary(tmp_path / "run")
    assert (found["failed"], found["generated"], found["pass_at_1"], found["correct"]) == (1, 1, None, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tag", "a/b"], "--tag is 'a/b'"),
        (["--rank", "2", "--world", "2"], "--rank is 2; it takes 0 to 1"),
        (["--model", "/nowhere"], "/nowhere"),
        (["--temperature", "-1"], "temperature is -1.0"),
        (["--sha256", "00"], "not 00"),
        (["--data", "/nowhere.jsonl"], "/nowhere.jsonl cannot be read"),
    ],
)
def test_what_cannot_be_done_gets_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert generate.main(["--bench", "aime", *SAMPLE, *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
    assert not (ROOT / "eval" / "outputs" / "aime" / "a").exists()


def test_every_rank_gets_its_devices(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from deepinfer.config.envs import read_environment

    gpus = read_environment({"DEEPINFER_ACCELERATOR": "nvidia", "CUDA_VISIBLE_DEVICES": "4,5,6,7"})
    assert rank_settings(2, gpus) == [["CUDA_VISIBLE_DEVICES=4,5"], ["CUDA_VISIBLE_DEVICES=6,7"]]
    assert rank_settings(4, gpus)[3] == ["CUDA_VISIBLE_DEVICES=7"]
    monkeypatch.setenv("DEEPINFER_ACCELERATOR", "nvidia")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    assert generate.main(["--bench", "aime", *SAMPLE, "--dp", "2"]) == 2
    assert "--dp is 2; the 3 visible devices must be a multiple of it" in capsys.readouterr().err
