"""An append-only file of JSON Lines that survives a kill at any moment: what ends with a newline counts."""

import fcntl
import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from eval.harness.errors import EvalError


def read_journal(path: Path) -> list[dict[str, Any]]:
    """Every whole record of a journal, in order; a torn last line, or one still being written, is none.

    EvalError for a line that is no JSON object: the file was changed by something else.
    """
    lines = path.read_bytes().split(b"\n")[:-1]
    return [_record(line, f"{path}, line {number}") for number, line in enumerate(lines, 1)]


def _record(line: bytes, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise EvalError(f"{where} is not JSON ({error}); remove the line and what it held is made again") from None
    if not isinstance(record, dict):
        raise EvalError(f"{where} is no JSON object; remove the line and what it held is made again")
    return record


class Journal:
    """Appends records to a file that no other process appends to; safe to use from several threads."""

    def __init__(self, path: Path) -> None:
        """Open or make the file and cut a torn last line off; EvalError if another process has it open."""
        self._file = path.open("ab+", buffering=0)
        self._lock = threading.Lock()
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise EvalError(f"{path} is being written by another process; wait for it, or end it") from None
        self._cut_torn_line()

    def _cut_torn_line(self) -> None:
        self._file.seek(0)
        content = self._file.read()
        whole = content.rfind(b"\n") + 1
        if whole != len(content):
            self._file.truncate(whole)

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record, and return when it is on the disk."""
        line = json.dumps(record, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"
        with self._lock:
            start = self._file.seek(0, os.SEEK_END)
            try:
                written = 0
                while written < len(line):  # a raw write may take less than all of it
                    written += self._file.write(line[written:])
                os.fsync(self._file.fileno())
            except OSError:
                self._file.truncate(start)  # a full disk must not leave half a line for the next one to follow
                raise

    def close(self) -> None:
        """Let others append."""
        self._file.close()

    def __enter__(self) -> "Journal":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
