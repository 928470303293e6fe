"""One sample of one question as it was generated, and which samples a run is made of."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from hashlib import blake2b, sha256
from typing import Any

from deepinfer import RequestOutput
from eval.harness.errors import EvalError
from eval.harness.problems import Problem

Key = tuple[str, int]
"""Question id and sample index."""


@dataclass(frozen=True)
class Rollout:
    """A line of `rollouts.jsonl`.

    seed: of the sample's draws. prompt_hash: of the token ids that the model read; None if it read none.
    text: the answer. reasoning: what came before it, None without thinking.
    finish_reason: "stop", "length" (cut off) or "error", with what went wrong in `error`.
    prompt_tokens, completion_tokens: counts; the latter includes the reasoning.
    """

    question: str
    sample: int
    seed: int
    prompt_hash: str | None
    text: str
    reasoning: str | None
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    error: str | None = None

    @property
    def key(self) -> Key:
        """What it is a sample of."""
        return self.question, self.sample

    @property
    def failed(self) -> bool:
        """Whether it was not generated to an end, so that it has to be again."""
        return self.finish_reason == "error"

    @property
    def text_hash(self) -> str:
        """Names the answer that a verdict is about."""
        return blake2b(self.text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()

    def as_json(self) -> dict[str, Any]:
        """The line's fields."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any], where: str) -> "Rollout":
        """Read a line's fields; EvalError that begins with `where` if they are others."""
        names = {field.name for field in fields(cls)}
        if record.keys() != names:
            odd = sorted(record.keys() ^ names)
            raise EvalError(f"{where} is no rollout: {', '.join(odd)} missing or unknown")
        if not (isinstance(record["question"], str) and isinstance(record["sample"], int)):
            raise EvalError(f"{where} is no rollout: question takes text and sample a number")
        return cls(**record)


@dataclass(frozen=True)
class Task:
    """One sample to generate."""

    problem: Problem
    sample: int
    seed: int

    @property
    def key(self) -> Key:
        """As that of its rollout."""
        return self.problem.id, self.sample


def make_tasks(problems: Sequence[Problem], samples: int, run_seed: int) -> list[Task]:
    """Every sample of a run: all questions once, then all again, so that a part of a run is a fair part."""
    return [
        Task(problem, sample, _seed(run_seed, problem.id, sample)) for sample in range(samples) for problem in problems
    ]


def shard(tasks: Sequence[Task], rank: int, world: int) -> list[Task]:
    """The part of one rank; it depends on nothing but the list, so no two ranks share a sample."""
    return list(tasks[rank::world])


def _seed(run_seed: int, question: str, sample: int) -> int:
    """64 bits from question, sample and the run's seed alone: what is generated beside it changes nothing."""
    return int.from_bytes(blake2b(f"{run_seed}/{sample}/{question}".encode(), digest_size=8).digest())


def make_rollout(task: Task, output: RequestOutput) -> Rollout:
    """What the engine gave for a task."""
    completion = output.outputs[0]
    text = completion.text if completion.content is None else completion.content
    ids = output.prompt_token_ids
    return Rollout(
        task.problem.id,
        task.sample,
        task.seed,
        sha256(b"".join(token.to_bytes(4, "little") for token in ids)).hexdigest() if ids else None,
        text,
        completion.reasoning,
        completion.finish_reason,
        output.num_prompt_tokens,
        completion.num_tokens,
        None if output.error is None else str(output.error),
    )


def merge(rollouts: Iterable[Rollout]) -> tuple[dict[Key, Rollout], int]:
    """One rollout a sample, and how many more there were: the first that did not fail, else the last one."""
    merged: dict[Key, Rollout] = {}
    repeated = 0
    for rollout in rollouts:
        known = merged.get(rollout.key)
        if known is None or known.failed:
            merged[rollout.key] = rollout
        elif not rollout.failed:
            repeated += 1
    return merged, repeated
