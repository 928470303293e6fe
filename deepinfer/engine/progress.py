"""A progress bar over requests that also tells the speed."""

import sys
import time
from types import TracebackType

from tqdm import tqdm

from deepinfer.engine.sequence import Sequence


class Progress:
    """Counts ended requests and generated tokens while a batch runs; used as a context."""

    def __init__(self, requests: int, shown: bool) -> None:
        pause = 0.2 if sys.stderr.isatty() else 5.0  # seconds between redraws; a log file wants few
        self._bar = tqdm(
            total=requests, desc="requests", unit="req", disable=not (shown and requests), mininterval=pause, miniters=0
        )
        self._begin = time.perf_counter()
        self._tokens = 0

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()

    def step(self, rows: list[Sequence]) -> None:
        """Take note of one step, which gave each of `rows` a token or failed it."""
        self._tokens += sum(row.finish_reason != "error" for row in rows)
        speed = self._tokens / (time.perf_counter() - self._begin)
        self._bar.set_postfix_str(f"{self._tokens} tokens, {speed:.1f} tokens/s", refresh=False)
        self._bar.update(sum(row.finish_reason is not None for row in rows))
