"""Ctrl-C is heeded between steps: amid one it would leave requests, pages and slots in a state that fits nothing."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def held_interrupts() -> Iterator[Callable[[], None]]:
    """Hold SIGINT back; the function that is given lets the handler have one that came (it raises, as a rule).

    Only the main thread gets signals, and only a handler in Python can be made to wait; elsewhere nothing is held.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield lambda: None
        return
    held: list[FrameType | None] = []

    def deliver() -> None:
        if held:
            frame = held[-1]
            held.clear()
            handler(signal.SIGINT, frame)

    signal.signal(signal.SIGINT, lambda _, frame: held.append(frame))
    try:
        yield deliver
    finally:
        signal.signal(signal.SIGINT, handler)
    deliver()
