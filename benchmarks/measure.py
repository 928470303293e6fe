"""What the benchmarks share: times taken in turns, ratios within a round, the machine, text to run."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median

import torch

from deepinfer.checkpoint.locate import resolve_model
from deepinfer.text.tokenizer import Tokenizer

TEXT = Path(__file__).parents[1] / "eval" / "heldout.txt"


def seconds(action: Callable[[], object]) -> float:
    """How long `action` takes."""
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def in_turns(measures: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Take each measure once a round, so that whatever else the machine does hits all of them alike."""
    taken: dict[str, list[float]] = {name: [] for name in measures}
    for _ in range(rounds):
        for name, measure in measures.items():
            taken[name].append(measure())
    return taken


def ratio(over: Sequence[float], under: Sequence[float]) -> str:
    """Median, least and largest of the ratios within a round."""
    ratios = [one / other for one, other in zip(over, under, strict=True)]
    return f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def machine() -> str:
    """The machine in a line, with how busy it is."""
    load = os.getloadavg()[0]
    return (
        f"{os.cpu_count()} cores, {torch.get_num_threads()} torch threads, torch {torch.__version__}, load {load:.1f}"
    )


def text(model: str | None, count: int, offset: int = 0) -> list[int]:
    """`count` token ids of held-out text from `offset` on; it starts over where it ends."""
    ids = Tokenizer.from_file(resolve_model(model)).encode(TEXT.read_text(encoding="utf-8"))
    return [ids[(offset + place) % len(ids)] for place in range(count)]
