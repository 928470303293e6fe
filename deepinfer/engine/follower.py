"""A rank that does what rank 0 hands out; `main` is the whole life of a process that is one."""

import contextlib
import os
import pickle
import sys
import threading
import traceback
from dataclasses import dataclass, replace
from pathlib import Path

from deepinfer.config.engine import EngineConfig
from deepinfer.config.envs import Environment
from deepinfer.core.errors import RankError
from deepinfer.core.outputs import RequestOutput
from deepinfer.core.request import Request
from deepinfer.engine.device import select_device
from deepinfer.engine.engine import Engine
from deepinfer.engine.sequence import Sequence
from deepinfer.parallel.member import Member
from deepinfer.parallel.ranks import Ranks
from deepinfer.parallel.topology import Topology
from deepinfer.sampling.grammar.constraint import Constraint
from deepinfer.sampling.grammar.request import GrammarDesk


@dataclass(frozen=True)
class Orders:
    """All that a rank needs to know; host and port are where the ranks meet."""

    rank: int
    topology: Topology
    host: str
    port: int
    directory: Path
    environment: Environment
    settings: EngineConfig


@dataclass(frozen=True)
class Parcel:
    """A request on its way to another rank, which compiles its grammar again."""

    request: Request
    constraint: Constraint | None = None
    end_thinking: int | None = None

    @classmethod
    def pack(cls, request: Request) -> "Parcel":
        """Make the request ready to be sent."""
        grammar = request.grammar
        if grammar is None:
            return cls(request)
        return cls(replace(request, grammar=None), grammar.constraint, grammar.end_thinking)

    def unpack(self, grammars: GrammarDesk) -> Request:
        """The request as it was."""
        if self.constraint is None:
            return self.request
        return replace(self.request, grammar=grammars.start(self.constraint, self.end_thinking))


@dataclass(frozen=True)
class Answer:
    """A request's output on its way to rank 0, which has the prompt."""

    call: int
    output: RequestOutput


@dataclass(frozen=True)
class Done:
    """A rank has nothing left to do for a call."""

    call: int
    statistics: object


def join(orders: Orders, ranks: Ranks) -> tuple[Member, Engine]:
    """Meet the others and load this rank's part; all ranks do so, and return when the last one has."""
    ranks.meet("here")
    topology, device = orders.topology, select_device(orders.environment.accelerator)
    collectives = ranks.connect(device) if topology.ep > 1 else None
    group = ranks.connect_group(topology.cp, device) if topology.cp > 1 else None
    member = Member(topology, ranks, collectives, group)
    engine = Engine(orders.directory, orders.environment, _own_settings(orders), member)
    ranks.meet("loaded")
    return member, engine


class Follower:
    """Answers its share of each call."""

    def __init__(self, ranks: Ranks, engine: Engine) -> None:
        self._ranks, self._engine = ranks, engine
        self._call = 0

    def serve_call(self) -> None:
        """Wait for the next call and do this rank's part."""
        call, self._call = self._call, self._call + 1
        key = call_key(call, self._ranks.rank)
        share: list[Parcel] | None = self._ranks.take(key)
        self._ranks.drop(key)
        if share is None:
            self._engine.close()
        else:
            self._answer(call, [parcel.unpack(self._engine.grammars) for parcel in share])
        self._ranks.post(Done(call, self._engine.statistics.snapshot()))

    def _answer(self, call: int, share: list[Request]) -> None:
        def look(_: list[Sequence]) -> None:
            if self._ranks.published(cancel_key(call)):
                raise _Cancelled

        def send(output: RequestOutput) -> None:
            self._ranks.post(Answer(call, replace(output, prompt=None, prompt_token_ids=())))

        if self._engine.follows:
            while self._engine.follow():
                pass
            return
        with contextlib.suppress(_Cancelled):
            self._engine.run(share, look, send)
        while self._engine.stand_by():
            pass


class _Cancelled(Exception):
    """Rank 0 was interrupted."""


def call_key(call: int, rank: int) -> str:
    """Where a rank finds its share of a call: requests, or None to keep what is worth keeping."""
    return f"call/{call}/{rank}"


def cancel_key(call: int) -> str:
    """What says that a call's results are not wanted any more."""
    return f"cancel/{call}"


def result_key(call: int) -> str:
    """Where other launchers find all outputs of a call."""
    return f"result/{call}"


def _own_settings(orders: Orders) -> EngineConfig:
    """On disk every rank has a directory of its own."""
    settings = orders.settings
    if settings.disk_cache is None:
        return settings
    return replace(settings, disk_cache=Path(settings.disk_cache) / f"rank{orders.rank}")


def main() -> None:
    """Take pickled orders from standard input; serve until it closes, as it does when the process behind it ends."""
    orders: Orders = pickle.load(sys.stdin.buffer)

    def end_with_parent() -> None:
        sys.stdin.buffer.read()
        os._exit(0)

    threading.Thread(target=end_with_parent, daemon=True).start()
    ranks = Ranks(orders.rank, orders.topology.ranks, orders.host, orders.port, on_failure=lambda _: os._exit(1))
    try:
        _, engine = join(orders, ranks)
        follower = Follower(ranks, engine)
        while True:
            follower.serve_call()
    except RankError:
        pass
    except BaseException as error:
        traceback.print_exc()
        ranks.fail(f"rank {orders.rank} of {orders.topology.ranks} failed: {type(error).__name__}: {error}")
    os._exit(1)
