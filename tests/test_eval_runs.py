"""A run's directory: what survives a kill, who may write, what a resume may change; seeds and shards."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from eval_cases import lines, problem, rollout
from hypothesis import given
from hypothesis import strategies as st

from deepinfer import CompletionOutput, EngineError, RequestOutput
from eval.harness.errors import EvalError
from eval.harness.journal import Journal, read_journal
from eval.harness.rollouts import Rollout, make_rollout, make_tasks, merge, shard
from eval.harness.run_directory import RunDirectory

PROBLEMS = [problem(name) for name in ("a", "b", "c")]
RECORD = {"benchmark": "aime", "samples": 2, "sampling": {"temperature": 1.0}, "where": {"model": "here"}}


class TestJournal:
    def test_what_is_appended_is_read(self, tmp_path: Path) -> None:
        path = tmp_path / "journal"
        records: list[dict[str, Any]] = [{"text": "a\nb\u2028c"}, {"text": "\ud800"}, {"text": "é" * 100_000}, {}]
        with Journal(path) as journal:
            for record in records:
                journal.append(record)
            assert read_journal(path) == records, "while it is still open"
        with Journal(path) as journal:
            journal.append({"more": 1})
        assert read_journal(path) == [*records, {"more": 1}]

    @pytest.mark.parametrize("torn", ['{"a": 1', '{"a": 1}', "", '{"a": "\u00e9'])
    def test_a_torn_last_line_never_was(self, tmp_path: Path, torn: str) -> None:
        path = tmp_path / "journal"
        path.write_bytes(b'{"n": 0}\n' + torn.encode()[: len(torn.encode()) - (torn[-1:] == "é")])
        assert read_journal(path) == [{"n": 0}]
        with Journal(path) as journal:
            journal.append({"n": 1})
        assert read_journal(path) == [{"n": 0}, {"n": 1}]

    @given(st.integers(0, 200))
    def test_any_cut_leaves_whole_records(self, tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
        path = tmp_path_factory.mktemp("cut") / "journal"
        content = b"".join(json.dumps({"number": number}).encode() + b"\n" for number in range(12))
        path.write_bytes(content[:cut])
        whole = content[:cut].count(b"\n")
        assert [record["number"] for record in read_journal(path)] == list(range(whole))
        with Journal(path) as journal:
            journal.append({"number": -1})
        assert [record["number"] for record in read_journal(path)] == [*range(whole), -1]

    @pytest.mark.parametrize(("line", "message"), [(b"{,}", "is not JSON"), (b"[1]", "is no JSON object")])
    def test_a_changed_line_is_named(self, tmp_path: Path, line: bytes, message: str) -> None:
        path = tmp_path / "journal"
        path.write_bytes(b"{}\n" + line + b"\n{}\n")
        with pytest.raises(EvalError, match=f"line 2 {message}.*remove the line"):
            read_journal(path)

    def test_two_writers_are_one_too_many(self, tmp_path: Path) -> None:
        with Journal(tmp_path / "journal"), pytest.raises(EvalError, match="being written by another process"):
            Journal(tmp_path / "journal")
        Journal(tmp_path / "journal").close()

    def test_threads_do_not_mix_their_lines(self, tmp_path: Path) -> None:
        with Journal(tmp_path / "journal") as journal:

            def write(who: int) -> None:
                for number in range(20):
                    journal.append({"who": who, "number": number, "text": "x" * 5000})

            threads = [threading.Thread(target=write, args=(who,)) for who in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        found = [(record["who"], record["number"]) for record in read_journal(tmp_path / "journal")]
        assert sorted(found) == [(who, number) for who in range(4) for number in range(20)]

    def test_a_full_disk_leaves_no_half_line(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = tmp_path / "journal"

        def full(descriptor: int) -> None:
            raise OSError("no space left on device")

        with Journal(path) as journal:
            journal.append({"n": 0})
            with monkeypatch.context() as patch:
                patch.setattr(os, "fsync", full)
                with pytest.raises(OSError, match="no space"):
                    journal.append({"n": 1})
            journal.append({"n": 2})
        assert read_journal(path) == [{"n": 0}, {"n": 2}]


class TestTasks:
    def test_seeds_depend_on_question_sample_and_run_alone(self) -> None:
        tasks = make_tasks(PROBLEMS, 4, 7)
        seeds = {task.key: task.seed for task in tasks}
        assert len(set(seeds.values())) == 12
        assert all(0 <= seed < 2**64 for seed in seeds.values())
        fewer = {task.key: task.seed for task in make_tasks(PROBLEMS[1:2], 2, 7)}
        assert fewer == {key: seeds[key] for key in (("b", 0), ("b", 1))}
        assert not set(seeds.values()) & {task.seed for task in make_tasks(PROBLEMS, 4, 8)}

    def test_every_question_is_asked_once_before_any_twice(self) -> None:
        assert [task.key for task in make_tasks(PROBLEMS[:2], 2, 0)] == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]

    @given(st.integers(0, 40), st.integers(1, 9))
    def test_ranks_share_everything_and_nothing_twice(self, samples: int, world: int) -> None:
        tasks = make_tasks(PROBLEMS, samples, 0)
        shares = [shard(tasks, rank, world) for rank in range(world)]
        assert sorted(task.key for share in shares for task in share) == sorted(task.key for task in tasks)
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


class TestRollouts:
    def output(self, **fields: Any) -> RequestOutput:
        completion = CompletionOutput("raw", (5, 6, 1), "stop", reasoning="because", content="4")
        return RequestOutput(
            **{"index": 0, "prompt": None, "prompt_token_ids": (1, 2), "outputs": (completion,)} | fields
        )

    def test_an_output_becomes_a_line_and_comes_back(self) -> None:
        task = make_tasks(PROBLEMS, 1, 0)[0]
        made = make_rollout(task, self.output())
        assert (made.text, made.reasoning, made.prompt_tokens, made.completion_tokens) == ("4", "because", 2, 3)
        assert (made.key, made.seed, made.failed) == (("a", 0), task.seed, False)
        assert made.prompt_hash is not None
        assert made.prompt_hash != make_rollout(task, self.output(prompt_token_ids=(1, 3))).prompt_hash
        assert Rollout.from_json(json.loads(json.dumps(made.as_json())), "here") == made

    def test_a_failed_request_is_a_failed_sample(self) -> None:
        made = make_rollout(make_tasks(PROBLEMS, 1, 0)[0], RequestOutput.failed(0, EngineError("a step failed")))
        assert (made.failed, made.error, made.prompt_hash) == (True, "a step failed", None)

    def test_a_sample_that_failed_is_replaced_and_no_other(self) -> None:
        bad, good, late = (
            rollout("a", text=text, finish_reason=reason)
            for text, reason in (("", "error"), ("1", "stop"), ("2", "stop"))
        )
        assert merge([bad, good]) == ({("a", 0): good}, 0)
        assert merge([bad, bad]) == ({("a", 0): bad}, 0)
        assert merge([good, bad]) == ({("a", 0): good}, 0)
        assert merge([good, late, bad]) == ({("a", 0): good}, 1)

    def test_other_fields_are_named(self) -> None:
        with pytest.raises(EvalError, match=r"line 3 is no rollout: seed, sead missing or unknown|sead, seed missing"):
            Rollout.from_json({("sead" if k == "seed" else k): v for k, v in rollout().as_json().items()}, "line 3")


class TestRunDirectory:
    def test_a_run_is_stated_once(self, tmp_path: Path) -> None:
        directory = RunDirectory(tmp_path / "run")
        directory.begin(RECORD, PROBLEMS)
        content = (tmp_path / "run" / "run.json").read_bytes()
        RunDirectory(tmp_path / "run").begin({**RECORD, "where": {"model": "moved"}}, PROBLEMS)
        assert (tmp_path / "run" / "run.json").read_bytes() == content
        assert directory.problems() == PROBLEMS
        assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["questions.jsonl", "run.json"]

    @pytest.mark.parametrize(
        ("change", "problems", "message"),
        [
            ({"samples": 3}, PROBLEMS, "samples was 2, not 3"),
            ({"sampling": {"temperature": 0.5}}, PROBLEMS, "sampling.temperature was 1.0, not 0.5"),
            ({"sampling": {"temperature": 1.0, "top_p": 1}}, PROBLEMS, "sampling.top_p was null, not 1"),
            ({}, PROBLEMS[:2], "questions_sha256 was"),
        ],
    )
    def test_a_resume_with_other_parameters_is_refused(
        self, tmp_path: Path, change: dict[str, Any], problems: Any, message: str
    ) -> None:
        RunDirectory(tmp_path).begin(RECORD, PROBLEMS)
        with pytest.raises(EvalError) as caught:
            RunDirectory(tmp_path).begin({**RECORD, **change}, problems)
        assert message in str(caught.value)
        assert "ask for the same to resume it, or take another --tag" in str(caught.value)

    def test_what_a_kill_left_before_the_record_does_no_harm(self, tmp_path: Path) -> None:
        (tmp_path / "questions.jsonl").write_text("half a li")
        directory = RunDirectory(tmp_path)
        directory.begin(RECORD, PROBLEMS)
        assert directory.problems() == PROBLEMS

    def test_questions_that_were_changed_are_refused(self, tmp_path: Path) -> None:
        directory = RunDirectory(tmp_path)
        directory.begin(RECORD, PROBLEMS)
        path = tmp_path / "questions.jsonl"
        path.write_text(path.read_text().replace("42", "43"))
        with pytest.raises(EvalError, match="must not be changed"):
            directory.problems()

    def test_a_directory_without_a_run_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(EvalError, match=r"has no run.json; pass the directory of a run"):
            _ = RunDirectory(tmp_path).record
        (tmp_path / "run.json").write_text("{")
        with pytest.raises(EvalError, match=r"run.json cannot be read"):
            _ = RunDirectory(tmp_path).record

    def test_ranks_write_their_own_files_and_all_are_read(self, tmp_path: Path) -> None:
        first, second = RunDirectory(tmp_path), RunDirectory(tmp_path)
        with first.open_rollouts(0, 2) as one, second.open_rollouts(1, 2) as two:
            one.append(rollout("a").as_json())
            two.append(rollout("b").as_json())
        assert sorted(path.name for path in tmp_path.glob("rollouts*")) == [
            "rollouts.0-of-2.jsonl",
            "rollouts.1-of-2.jsonl",
        ]
        assert first.rollouts()[0].keys() == {("a", 0), ("b", 0)}

    def test_the_same_rank_twice_is_refused(self, tmp_path: Path) -> None:
        with (
            RunDirectory(tmp_path).open_rollouts(0, 2),
            pytest.raises(EvalError, match=r"rollouts.0-of-2.jsonl is being written by another process"),
        ):
            RunDirectory(tmp_path).open_rollouts(0, 2)

    def test_two_worlds_at_once_are_refused(self, tmp_path: Path) -> None:
        first = RunDirectory(tmp_path)
        with first.open_rollouts(0, 2), pytest.raises(EvalError, match="is being generated by 2 ranks"):
            RunDirectory(tmp_path).open_rollouts(0, 1)
        del first
        RunDirectory(tmp_path).open_rollouts(0, 1).close()


WRITER = """
import sys
from eval.harness.run_directory import RunDirectory
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from eval_cases import rollout
journal = RunDirectory(Path(sys.argv[1])).open_rollouts(0, 1)
for number in range(10 ** 6):
    journal.append(rollout("a", number, "x" * 20000).as_json())
    print(number, flush=True)
"""


def test_a_process_killed_while_it_writes_loses_nothing_it_had_written(tmp_path: Path) -> None:
    line = [sys.executable, "-c", WRITER, str(tmp_path), str(Path(__file__).parent)]
    root = str(Path(__file__).parents[1])
    with subprocess.Popen(line, stdout=subprocess.PIPE, cwd=root, text=True) as process:
        assert process.stdout is not None
        said = [int(process.stdout.readline()) for _ in range(20)]
        process.send_signal(signal.SIGKILL)
        said += map(int, process.stdout.read().split())
    directory = RunDirectory(tmp_path)
    kept = directory.rollouts()[0]
    assert {("a", number) for number in said} <= kept.keys()
    assert len(kept) <= len(said) + 1
    with directory.open_rollouts(0, 1) as journal:
        journal.append(rollout("b").as_json())
    assert ("b", 0) in directory.rollouts()[0]
    assert len(lines(tmp_path / "rollouts.jsonl")) == len(kept) + 1
