"""Questions of a run: the forms of the real sets, checksums and counts, the hub, the generated set."""

import base64
import hashlib
import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from PIL import Image

from deepinfer.text.images import load_image
from eval.harness import benchmarks, hub
from eval.harness.benchmarks import BENCHMARKS, Benchmark, HubSet
from eval.harness.dataset import load_dataset
from eval.harness.errors import EvalError
from eval.harness.problems import read_problem
from eval.harness.prompts import make_messages
from eval.sample import make

AIME, GPQA, HLE = (BENCHMARKS[name] for name in ("aime", "gpqa", "hle"))
PIXEL = "data:image/png;base64,iVBORw0KGgo="
GPQA_ROW = {
    "Record ID": "rec1",
    "Question": "Which one?",
    "Correct Answer": "right",
    **{f"Incorrect Answer {number}": f"wrong {number}" for number in (1, 2, 3)},
    "Explanation": "",
}


def write(path: Path, *records: Any) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


def aime_records(count: int) -> list[dict[str, Any]]:
    return [{"problem_idx": number, "problem": f"Find {number}.", "answer": number} for number in range(count)]


def test_the_table_is_the_contract() -> None:
    found = {name: (each.questions, each.images, each.samples, each.reference) for name, each in BENCHMARKS.items()}
    assert found == {"aime": (30, 0, 32, 0.999), "hle": (2500, 342, 1, 0.426), "gpqa": (198, 0, 8, 0.934)}
    assert all(each.licence for each in BENCHMARKS.values())


def test_a_whole_set_is_read(tmp_path: Path) -> None:
    dataset = load_dataset(AIME, write(tmp_path / "aime.jsonl", *aime_records(30)))
    assert [problem.answer for problem in dataset.problems] == [str(number) for number in range(30)]
    assert dataset.extent == "whole"
    assert dataset.sha256 == hashlib.sha256((tmp_path / "aime.jsonl").read_bytes()).hexdigest()


def test_a_part_of_a_set_has_to_be_said(tmp_path: Path) -> None:
    path = write(tmp_path / "part.jsonl", *aime_records(3))
    with pytest.raises(EvalError, match=r"has 3 questions.*AIME 2026 has 30 questions.*--questions 3"):
        load_dataset(AIME, path)
    part = load_dataset(AIME, path, questions=3)
    assert (part.extent, len(part.problems)) == ("part", 3)
    with pytest.raises(EvalError, match="not the 4 of --questions"):
        load_dataset(AIME, path, questions=4)


def test_pictures_are_counted(tmp_path: Path) -> None:
    records = [{"id": str(n), "question": "?", "answer": "x", "image": ""} for n in range(2500)]
    with pytest.raises(EvalError, match="2500 questions, 0 with pictures; HLE has 2500 questions, 342 with pictures"):
        load_dataset(HLE, write(tmp_path / "hle.jsonl", *records))


def test_checksums_are_checked(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *aime_records(30))
    right = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    load_dataset(AIME, path, sha256=right.upper())
    with pytest.raises(EvalError, match="it was changed, or is another file"):
        load_dataset(AIME, path, sha256="0" * 64)
    (tmp_path / "SHA256SUMS").write_text(f"{'0' * 64}  b.jsonl\n{right} *a.jsonl\n")
    load_dataset(AIME, path)
    write(tmp_path / "a.jsonl", *aime_records(29), {"id": "x", "problem": "Find x.", "answer": 1})
    with pytest.raises(EvalError, match=f"not {right}"):
        load_dataset(AIME, path)


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("integer", [], "is no object; it takes"),
        ("integer", {"problem": "?", "answer": 1}, "has no 'id'"),
        ("integer", {"id": "1", "problem": "?", "answer": "x"}, "answer is 'x'"),
        ("integer", {"id": "1", "problem": "?", "answer": 1.5}, "answer is 1.5"),
        ("integer", {"id": "1", "problem": "?", "answer": True}, "answer is true"),
        ("integer", {"id": "1", "problem": " ", "answer": 1}, 'problem is " "'),
        ("choice", {"id": "1", "question": "?", "choices": ["a", "b"], "answer": "C"}, "answer is 'C'"),
        ("choice", {"id": "1", "question": "?", "choices": "ab", "answer": "A"}, "choices is no list"),
        ("choice", {**GPQA_ROW, "Incorrect Answer 2": None}, "Incorrect Answer 2 is null"),
        ("free", {"id": "1", "question": "?"}, "has no 'answer'"),
        ("free", {"id": "1", "question": "?", "answer": "a", "image": "cat.png"}, "image is no data URL"),
    ],
)
def test_bad_records_are_named(kind: Any, fields: Any, message: str) -> None:
    with pytest.raises(EvalError, match=r"set\.jsonl, line 7") as caught:
        read_problem(fields, kind, "set.jsonl, line 7")
    assert message in str(caught.value)
    assert "it takes {" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{}\n{", "line 1 has no 'id'"),
        (b"\n\nnot json\n", "line 3 is not JSON"),
        (b'{"id": "\xff"}', "line 1 is not JSON"),
        (b'{"id": 1, "problem": "a", "answer": 1}\n{"id": "1", "problem": "b", "answer": 1}', "line 2 has the id '1'"),
        (b"", "0 questions"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "set.jsonl"
    path.write_bytes(content)
    with pytest.raises(EvalError) as caught:
        load_dataset(AIME, str(path))
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(EvalError, match=r"nowhere.jsonl cannot be read.*--data takes hub, sample or"):
        load_dataset(AIME, str(tmp_path / "nowhere.jsonl"))


def test_the_order_of_choices_depends_on_the_id_alone() -> None:
    letters = set()
    for number in range(40):
        first, second = (read_problem({**GPQA_ROW, "Record ID": f"r{number}"}, "choice", "here") for _ in range(2))
        assert first == second
        assert first.choices["ABCD".index(first.answer)] == "right"
        assert sorted(first.choices) == ["right", "wrong 1", "wrong 2", "wrong 3"]
        letters.add(first.answer)
    assert letters == set("ABCD")


def test_questions_are_put_with_their_instructions() -> None:
    choice = read_problem(GPQA_ROW, "choice", "here")
    text = make_messages(choice, "full")[0]["content"]
    assert text.startswith("Which one?\n\nA) ")
    assert f"\n{choice.answer}) right\n" in f"{text}\n"
    assert "ANSWER:" in text
    assert make_messages(choice, "bare") == [{"role": "user", "content": "Which one?"}]
    number = read_problem(aime_records(1)[0], "integer", "here")
    assert "\\boxed{}" in make_messages(number, "full")[0]["content"]
    seen = read_problem({"id": "1", "question": "What?", "answer": "a", "image": PIXEL}, "free", "here")
    picture, words = make_messages(seen, "full")[0]["content"]
    assert picture == {"type": "image_url", "image_url": {"url": PIXEL}}
    assert words["text"].startswith("What?")


class TestSampleSet:
    def test_it_is_what_its_script_makes(self, tmp_path: Path) -> None:
        assert make.main(["--out", str(tmp_path)]) == 0
        for name, benchmark in BENCHMARKS.items():
            made, kept = (records(path) for path in (tmp_path / f"{name}.jsonl", benchmark.sample_file))
            for one, other in zip(made, kept, strict=True):
                # Another version of Pillow may draw and pack a picture a little differently.
                assert {**one, "image": ""} == {**other, "image": ""}
                assert bool(one.get("image")) == bool(other.get("image"))

    def test_it_is_whole(self) -> None:
        for benchmark in BENCHMARKS.values():
            dataset = load_dataset(benchmark, "sample")
            assert len(dataset.problems) == benchmark.sample_questions
            for problem in dataset.problems:
                if problem.image is not None:
                    content = base64.b64decode(problem.image.partition(",")[2])
                    assert Image.open(io.BytesIO(content)).format == "PNG"
                    assert load_image(problem.image).size[1] >= 32

    def test_other_seeds_make_other_questions(self, tmp_path: Path) -> None:
        line = [sys.executable, make.__file__, "--out", str(tmp_path), "--seed", "2"]
        subprocess.run(line, check=True, timeout=60, cwd=tmp_path)
        assert records(tmp_path / "aime.jsonl") != records(AIME.sample_file)


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


class FakeHub:
    """Serves files as the hub's package does."""

    def __init__(self, patch: pytest.MonkeyPatch, directory: Path, files: dict[str, bytes]) -> None:
        self.directory, self.files, self.downloads = directory, files, 0
        self.digests = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
        patch.setattr(huggingface_hub, "HfApi", lambda: SimpleNamespace(dataset_info=self.info))
        patch.setattr(huggingface_hub, "hf_hub_download", self.download)

    def info(self, repository: str, revision: str, files_metadata: bool) -> Any:
        siblings = [
            SimpleNamespace(rfilename=name, lfs=SimpleNamespace(sha256=self.digests[name])) for name in self.files
        ]
        return SimpleNamespace(sha="c0ffee", siblings=[*siblings, SimpleNamespace(rfilename="README.md", lfs=None)])

    def download(self, repository: str, name: str, repo_type: str, revision: str) -> str:
        assert (repo_type, revision) == ("dataset", "c0ffee")
        self.downloads += 1
        path = self.directory / name.replace("/", "-")
        path.write_bytes(self.files[name])
        return str(path)


@pytest.fixture
def gpqa(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Benchmark:
    monkeypatch.setattr(benchmarks, "EVAL", tmp_path / "eval")
    return replace(GPQA, questions=2)


def gpqa_csv() -> bytes:
    names = list(GPQA_ROW)
    rows = [names, *[[f'"{GPQA_ROW[name]}, {number}"' for name in names] for number in range(2)]]
    return "\n".join(",".join(row) for row in rows).encode()


class TestHub:
    def test_a_set_is_fetched_once_and_checked_ever_after(
        self, gpqa: Benchmark, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fake = FakeHub(monkeypatch, tmp_path, {"gpqa_diamond.csv": gpqa_csv(), "gpqa_main.csv": b""})
        first, again = (load_dataset(gpqa, "hub") for _ in range(2))
        assert first == again
        assert fake.downloads == 1
        assert [problem.id for problem in first.problems] == ["rec1, 0", "rec1, 1"]
        assert "Explanation" not in gpqa.cached_file.read_text()
        gpqa.cached_file.write_text(gpqa.cached_file.read_text().replace("right", "left"))
        with pytest.raises(EvalError, match="it was changed"):
            load_dataset(gpqa, "hub")

    def test_a_file_that_is_not_the_hub_s_is_refused(
        self, gpqa: Benchmark, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fake = FakeHub(monkeypatch, tmp_path, {"gpqa_diamond.csv": gpqa_csv()})
        fake.digests["gpqa_diamond.csv"] = "0" * 64
        with pytest.raises(EvalError, match="does not have the SHA-256 0000"):
            load_dataset(gpqa, "hub")
        assert not list(gpqa.cached_file.parent.iterdir()), "nothing half done is left"

    def test_other_columns_are_named(self, gpqa: Benchmark, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        FakeHub(monkeypatch, tmp_path, {"gpqa_diamond.csv": b"Question,Answer\na,b\n"})
        with pytest.raises(EvalError, match="has no column 'Record ID'"):
            load_dataset(gpqa, "hub")

    def test_no_such_file_is_named(self, gpqa: Benchmark, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        FakeHub(monkeypatch, tmp_path, {"other.csv": b""})
        with pytest.raises(EvalError, match=r"has no file gpqa_diamond.csv at c0ffee"):
            load_dataset(gpqa, "hub")

    def test_a_hub_out_of_reach_says_what_to_do(self, gpqa: Benchmark, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*arguments: object, **options: object) -> None:
            raise ConnectionError("Name or service not known\nmore")

        monkeypatch.setattr(huggingface_hub, "HfApi", lambda: SimpleNamespace(dataset_info=fail))
        with pytest.raises(EvalError) as caught:
            load_dataset(gpqa, "hub")
        message = str(caught.value)
        assert "Idavidrein/gpqa cannot be had from the Hugging Face hub (Name or service not known)" in message
        assert all(word in message for word in ("hf auth login", "--data FILE", "CC BY 4.0"))
        assert len(message.splitlines()) == 1

    def test_parquet_files_are_read(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        monkeypatch.setattr(benchmarks, "EVAL", tmp_path / "eval")
        files = {}
        for number in range(2):
            part = io.BytesIO()
            parquet.write_table(pyarrow.Table.from_pylist(aime_records(30)[number::2]), part)
            files[f"data/train-{number}.parquet"] = part.getvalue()
        FakeHub(monkeypatch, tmp_path, files)
        dataset = load_dataset(AIME, "hub")
        assert {problem.id for problem in dataset.problems} == {str(number) for number in range(30)}

    def test_parquet_needs_its_package(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(benchmarks, "EVAL", tmp_path / "eval")
        monkeypatch.setitem(sys.modules, "pyarrow", None)
        FakeHub(monkeypatch, tmp_path, {"data/train-0.parquet": b"PAR1"})
        with pytest.raises(EvalError, match=r"install pyarrow \(pip install 'deepinfer\[hub\]'\)"):
            load_dataset(AIME, "hub")


def test_every_set_has_the_columns_that_are_kept() -> None:
    assert hub._COLUMNS.keys() == BENCHMARKS.keys()
    assert all(isinstance(each.hub, HubSet) for each in BENCHMARKS.values())
