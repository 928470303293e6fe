"""Waiting for an exchange: a slow rank is waited for, and one that was broken off ends whether gloo says so or not."""

import threading
import time
from datetime import timedelta

import pytest
from rank_threads import run_ranks

from deepinfer.parallel import collectives as module
from deepinfer.parallel.collectives import Collectives


def test_a_slow_rank_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LOOK", timedelta(seconds=0.05))

    def meet(ranks: Collectives) -> tuple[list[int], bytes]:
        time.sleep(0.4 * ranks.rank)
        most = ranks.most([ranks.rank, -ranks.rank])
        time.sleep(0.2 * (1 - ranks.rank))
        return most, ranks.tell(b"first" if ranks.rank == 0 else None)

    assert run_ranks(2, meet) == [([1, 0], b"first")] * 2


def test_what_gloo_does_not_end_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exchange that began as it was broken off: nobody answers, and nothing closes its connection."""
    monkeypatch.setattr(module, "_LOOK", timedelta(seconds=0.05))
    left = threading.Event()

    def alone(ranks: Collectives) -> str:
        if ranks.rank == 1:
            left.wait(30)
            return ""
        threading.Timer(0.3, lambda: setattr(ranks, "_aborted", True)).start()
        with pytest.raises(RuntimeError) as error:
            ranks.most([1])
        left.set()
        return str(error.value)

    assert run_ranks(2, alone)[0] == "the exchange was broken off"
