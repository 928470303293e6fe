"""What a judge says about samples, and the file that keeps it."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from eval.harness.problems import Problem
from eval.harness.rollouts import Key, Rollout
from eval.harness.run_directory import RunDirectory

MODES = ("rule", "math", "llm")


class Case(NamedTuple):
    """A sample and the question it answers."""

    problem: Problem
    rollout: Rollout


@dataclass(frozen=True)
class Verdict:
    """Whether a sample is right; None where the judge could not tell, with the reason in `note`.

    text_hash: names the answer that was judged. extracted: what the judge took for the final answer, None for none.
    """

    question: str
    sample: int
    text_hash: str
    correct: bool | None
    extracted: str | None = None
    note: str | None = None

    @property
    def key(self) -> Key:
        """The sample it is about."""
        return self.question, self.sample

    @classmethod
    def of(
        cls, rollout: Rollout, correct: bool | None, extracted: str | None = None, note: str | None = None
    ) -> "Verdict":
        """A verdict about a sample."""
        return cls(*rollout.key, rollout.text_hash, correct, extracted, note)


def write_verdicts(directory: RunDirectory, mode: str, verdicts: Iterable[Verdict]) -> None:
    """Replace `verdicts-MODE.jsonl`."""
    lines = (json.dumps(asdict(verdict), ensure_ascii=False) + "\n" for verdict in verdicts)
    directory.write(_name(mode), "".join(lines))


def read_verdicts(directory: RunDirectory, mode: str, rollouts: Mapping[Key, Rollout]) -> dict[Key, Verdict] | None:
    """The verdicts of an earlier scoring about answers that are still these; None if this mode never ran."""
    path = directory.path / _name(mode)
    if not path.is_file():
        return None
    records: list[dict[str, Any]] = [json.loads(line) for line in path.read_bytes().splitlines()]
    verdicts = (Verdict(**record) for record in records)
    return {
        verdict.key: verdict
        for verdict in verdicts
        if verdict.key in rollouts and rollouts[verdict.key].text_hash == verdict.text_hash
    }


def _name(mode: str) -> str:
    return f"verdicts-{mode}.jsonl"
