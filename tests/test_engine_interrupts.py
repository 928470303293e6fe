"""Ctrl-C waits for the end of a step, then does what it would have done."""

import signal
import threading
from collections.abc import Iterator
from types import FrameType

import pytest

from deepinfer.engine.interrupts import held_interrupts


@pytest.fixture(autouse=True)
def same_handler_afterwards() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    yield
    assert signal.getsignal(signal.SIGINT) is before


def test_an_interrupt_waits_until_it_is_delivered() -> None:
    reached = []

    def steps() -> None:
        with held_interrupts() as deliver:
            deliver()
            signal.raise_signal(signal.SIGINT)
            reached.append("behind the signal")
            deliver()
            reached.append("behind the delivery")

    with pytest.raises(KeyboardInterrupt):
        steps()
    assert reached == ["behind the signal"]


def test_more_interrupts_do_not_disturb_while_things_are_put_in_order() -> None:
    reached = []

    def steps() -> None:
        with held_interrupts() as deliver:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            try:
                deliver()
            finally:
                signal.raise_signal(signal.SIGINT)
                reached.append("in order")

    with pytest.raises(KeyboardInterrupt):
        steps()
    assert reached == ["in order"]


def test_an_interrupt_behind_the_last_step_is_not_lost() -> None:
    with pytest.raises(KeyboardInterrupt), held_interrupts():
        signal.raise_signal(signal.SIGINT)


def test_a_handler_of_the_callers_own_is_called() -> None:
    calls: list[tuple[int, FrameType | None]] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: calls.append((number, frame)))
    try:
        with held_interrupts() as deliver:
            signal.raise_signal(signal.SIGINT)
            assert not calls
            deliver()
            deliver()
    finally:
        signal.signal(signal.SIGINT, before)
    assert [(number, frame is not None) for number, frame in calls] == [(signal.SIGINT, True)]


def test_an_ignored_interrupt_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with held_interrupts() as deliver:
            signal.raise_signal(signal.SIGINT)
            deliver()
    finally:
        signal.signal(signal.SIGINT, before)


def test_another_thread_holds_nothing() -> None:
    found = []

    def work() -> None:
        with held_interrupts() as deliver:
            found.append(signal.getsignal(signal.SIGINT))
            deliver()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [signal.getsignal(signal.SIGINT)]
