"""How far a run is, how fast, and how long it will take."""

import sys
import time
from types import TracebackType

from tqdm import tqdm

from eval.harness.rollouts import Rollout


class Progress:
    """A bar over the samples of one rank; those of earlier runs count as done, not as speed. Used as a context."""

    def __init__(self, name: str, total: int, done: int, shown: bool, place: int = 0) -> None:
        """`place`: line of the terminal, so that the bars of several ranks stand below each other."""
        pause = 0.2 if sys.stderr.isatty() else 10.0  # seconds between redraws; a log file wants few
        self._bar = tqdm(
            total=total,
            initial=done,
            desc=name,
            unit="sample",
            disable=not shown,
            smoothing=0,  # the mean of the whole run: the end of a batch differs from its beginning
            mininterval=pause,
            position=place,
        )
        self._begin = time.perf_counter()
        self.failed = 0
        self._tokens = self._truncated = 0

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()

    def add(self, rollout: Rollout) -> None:
        """Count one more sample."""
        self._tokens += rollout.completion_tokens
        self._truncated += rollout.finish_reason == "length"
        self.failed += rollout.failed
        speed = self._tokens / (time.perf_counter() - self._begin)
        more = f"{speed:.0f} tokens/s, {self._truncated} truncated, {self.failed} failed"
        self._bar.set_postfix_str(more, refresh=False)
        self._bar.update()
