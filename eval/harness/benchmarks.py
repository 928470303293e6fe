"""The benchmarks: how many questions, how many samples, where the data come from and on what terms."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Kind = Literal["integer", "choice", "free"]
"""What a right answer is: an integer in a box, a letter after `ANSWER:`, or anything that means the same."""

EVAL = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class HubSet:
    """Files of a data set on the Hugging Face hub; `pattern` is matched against their names."""

    repository: str
    revision: str
    pattern: str
    gated: bool = False


@dataclass(frozen=True)
class Benchmark:
    """One benchmark, and the generated set of the same form that lies in `eval/sample/`.

    questions, images: how many the set has, and how many of them have a picture; a file with another number is refused.
    samples: of each question, by default. sample_questions, sample_images: those of the generated set.
    reference: Pass@1 that was published for the released weights.
    """

    name: str
    title: str
    kind: Kind
    questions: int
    images: int
    samples: int
    sample_questions: int
    sample_images: int
    hub: HubSet
    licence: str
    reference: float

    @property
    def sample_file(self) -> Path:
        """The generated set."""
        return EVAL / "sample" / f"{self.name}.jsonl"

    @property
    def cached_file(self) -> Path:
        """Where a set that came from the hub is kept, as JSON Lines."""
        return EVAL / "data" / f"{self.name}.jsonl"


_ALL = (
    Benchmark(
        name="aime",
        title="AIME 2026",
        kind="integer",
        questions=30,
        images=0,
        samples=32,
        sample_questions=12,
        sample_images=0,
        hub=HubSet("MathArena/aime_2026", "main", "data/train-*.parquet"),
        licence="CC BY-NC-SA 4.0 (the MathArena transcription); the problems are the Mathematical Association of "
        "America's",
        reference=0.999,
    ),
    Benchmark(
        name="hle",
        title="HLE",
        kind="free",
        questions=2500,
        images=342,
        samples=1,
        sample_questions=10,
        sample_images=2,
        hub=HubSet("cais/hle", "5a81a4c7271a2a2a312b9a690f0c2fde837e4c29", "data/test-*.parquet", gated=True),
        licence="MIT; its authors ask that questions and answers are not published again",
        reference=0.426,
    ),
    Benchmark(
        name="gpqa",
        title="GPQA Diamond",
        kind="choice",
        questions=198,
        images=0,
        samples=8,
        sample_questions=8,
        sample_images=0,
        hub=HubSet("Idavidrein/gpqa", "633f5ee89ab8ad4522a9f850766b73f62147ffdd", "gpqa_diamond.csv", gated=True),
        licence="CC BY 4.0; its authors ask that examples are not shown online, in text or pictures",
        reference=0.934,
    ),
)
BENCHMARKS = {benchmark.name: benchmark for benchmark in _ALL}
