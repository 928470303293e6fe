"""A rank among others: where they meet, their post, and that they end together when one fails."""

import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from typing import Any

import torch
import torch.distributed

from deepinfer.core.errors import RankError
from deepinfer.parallel.collectives import Collectives

dist: Any = torch.distributed

_PULSE = 0.3
"""Seconds between looks for a failure."""
_PATIENCE = 5.0
"""Seconds to wait for the reason, when a connection has closed."""
_LEAST_PAUSE, _MOST_PAUSE = 0.001, 0.05
"""Seconds between looks for something to do: the longer nothing came, the longer the next pause."""
_FAILED = "failed"
_MAIL = "mail"


def free_port(host: str = "127.0.0.1") -> tuple[int, socket.socket]:
    """A free port of this machine, and a socket that listens there; by default to this machine alone."""
    listener = socket.socket()
    listener.bind((host, 0))
    listener.listen()
    return listener.getsockname()[1], listener


_MEETINGS = count()


def agreed_port(host: str, port: int, leads: bool) -> tuple[int, socket.socket | None]:
    """A port for the ranks, of which launcher 0, which `leads`, tells the others in a store that listens already.

    All launchers call it as often, in the same order.
    """
    store, key = dist.TCPStore(host, port, None, False), f"deepinfer/{next(_MEETINGS)}"
    if not leads:
        return int(store.get(key)), None
    chosen, listener = free_port("127.0.0.1" if host in ("127.0.0.1", "localhost") else "")
    store.set(key, str(chosen))
    return chosen, listener


class Ranks:
    """One rank's end of what all ranks share. Rank 0 leads: it holds the store, hands out work, gathers results.

    What is sent is pickled, so the port must be reachable for the ranks only; ranks of one machine meet on 127.0.0.1.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        host: str,
        port: int,
        *,
        listener: socket.socket | None = None,
        on_failure: Callable[[str], None] | None = None,
        alive: Callable[[], str | None] | None = None,
    ) -> None:
        """Meet at `host`:`port`; `listener` is rank 0's socket there, if it has one already.

        `on_failure` is called once, in another thread, with the reason when any rank has failed. `alive` is asked
        regularly and returns what is wrong with another rank that only this one can see.
        """
        self.rank, self.size = rank, size
        self._local = host == "127.0.0.1"
        given = {} if listener is None else {"master_listen_fd": listener.detach()}
        self._store = dist.TCPStore(
            host, port, None, rank == 0, timedelta(seconds=300), wait_for_workers=False, **given
        )
        self._watched = self._store.clone()
        self._on_failure, self._alive = on_failure, alive
        self._reason: str | None = None
        self._closed = threading.Event()
        self._collectives: list[Collectives] = []
        self._watch = threading.Thread(target=self._keep_watch, name="deepinfer-ranks", daemon=True)
        self._watch.start()

    def connect(self, device: torch.device) -> Collectives:
        """Connect with all other ranks, which do the same."""
        return self._connect(self._store, self.rank, self.size, device)

    def connect_group(self, size: int, device: torch.device) -> Collectives:
        """Connect with the ranks of the own group: `size` neighbours, the first of which is rank 0 there."""
        number, place = divmod(self.rank, size)
        return self._connect(dist.PrefixStore(f"group{number}", self._store), place, size, device)

    def _connect(self, store: Any, rank: int, size: int, device: torch.device) -> Collectives:
        with self.together():
            collectives = Collectives(store, rank, size, device, self._local)
        self._collectives.append(collectives)
        return collectives

    # What is handed out and sent back.

    def publish(self, key: str, value: object) -> None:
        """Leave something under a key."""
        self._store.set(key, pickle.dumps(value))

    def published(self, key: str) -> bool:
        """Whether there is something under the key."""
        return bool(self._store.check([key]))

    def take(self, key: str) -> Any:
        """Wait for what another rank leaves under `key`, for as long as no rank fails."""
        pause = _LEAST_PAUSE
        while not self.published(key):
            self.check()
            time.sleep(pause)
            pause = min(2 * pause, _MOST_PAUSE)
        return pickle.loads(self._store.get(key))

    def drop(self, key: str) -> None:
        """Forget what is left under a key."""
        self._store.delete_key(key)

    def post(self, letter: object) -> None:
        """Send something to rank 0."""
        self._store.queue_push(_MAIL, pickle.dumps((self.rank, letter)))

    def mail(self) -> Iterator[tuple[int, Any]]:
        """What came for rank 0 since it was last asked, each with its sender."""
        for _ in range(self._store.queue_len(_MAIL)):
            yield pickle.loads(self._store.queue_pop(_MAIL))

    def meet(self, where: str) -> None:
        """Wait until all ranks have come here; once for each name."""
        self.publish(f"{where}/{self.rank}", True)
        if self.rank == 0:
            for rank in range(self.size):
                self.take(f"{where}/{rank}")
            self.publish(f"{where}/all", True)
        self.take(f"{where}/all")

    # How they end.

    def check(self) -> None:
        """RankError if a rank has failed."""
        if self._reason is not None:
            raise RankError(self._reason)

    def fail(self, reason: str) -> RankError:
        """Tell all that this rank has failed, and end what they run together; returns the error to raise."""
        if self._reason is None:
            self._reason = reason
            self._store.compare_set(_FAILED, "", reason)
        self._abort()
        return RankError(self._reason)

    @contextmanager
    def together(self) -> Iterator[None]:
        """What the ranks do together: who fails in it ends all, and who is left by another says why that one failed."""
        self.check()
        try:
            yield
            self.check()  # an exchange that was broken off may have come back with anything
        except RankError:
            raise
        except Exception as error:
            reason = self._others_reason() if _is_connection(error) else None
            if reason is None:
                raise self.fail(f"rank {self.rank} of {self.size} failed: {type(error).__name__}: {error}") from error
            self._abort()
            raise RankError(reason) from error

    def close(self) -> None:
        """Leave; nobody is told."""
        self._closed.set()
        if threading.current_thread() is not self._watch:
            self._watch.join(timeout=5)

    def _others_reason(self) -> str | None:
        """Why another rank failed, which it may be about to say."""
        end = time.monotonic() + _PATIENCE
        while self._reason is None and time.monotonic() < end:
            time.sleep(_PULSE / 3)
        return self._reason

    def _keep_watch(self) -> None:
        while not self._closed.wait(_PULSE):
            try:
                if self._alive is not None and (reason := self._alive()) is not None:
                    self._watched.compare_set(_FAILED, "", reason)
                if not self._watched.check([_FAILED]):
                    continue
                reason = self._watched.get(_FAILED).decode()
            except Exception:
                if self._closed.is_set():
                    return
                reason = "rank 0 has gone, and all ranks end with it"
            own, self._reason = self._reason, self._reason or reason
            if own is None:
                self._abort()
            if self._on_failure is not None:
                self._on_failure(reason)
            return

    def _abort(self) -> None:
        broken, self._collectives = self._collectives, []
        for collectives in broken:
            collectives.abort()


def _is_connection(error: Exception) -> bool:
    """Whether a collective broke off; torch has no type of its own for that."""
    return isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError)
