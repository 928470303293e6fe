"""The engines of many ranks as one: starts them, spreads requests over them, gathers their outputs."""

import socket
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock

import torch

from deepinfer.checkpoint.reader import CONFIG_FILE
from deepinfer.config.engine import EngineConfig
from deepinfer.config.envs import Environment
from deepinfer.config.model import ModelConfig
from deepinfer.core.errors import ConfigError, RankError
from deepinfer.core.outputs import RequestOutput
from deepinfer.core.request import Request
from deepinfer.engine.children import Children
from deepinfer.engine.content import content_keys
from deepinfer.engine.follower import Answer, Done, Follower, Orders, Parcel, call_key, cancel_key, join, result_key
from deepinfer.engine.sequence import Sequence as Running
from deepinfer.engine.statistics import EngineStatistics, merged
from deepinfer.parallel.ranks import Ranks, agreed_port, free_port
from deepinfer.parallel.spread import Job, Spreader
from deepinfer.parallel.topology import Topology, choose_topology

_UNKNOWN_LENGTH = 1024
"""New tokens that a request without a limit is reckoned to take."""
_PAUSE = 0.002

OnStep = Callable[[list[Running]], None]
OnOutput = Callable[[RequestOutput], None]


def topology_of(settings: EngineConfig, environment: Environment) -> Topology:
    """The layout that settings and environment ask for; ConfigError if it cannot be."""
    devices = None
    if environment.accelerator == "nvidia":
        devices = len(_visible_devices(environment))
    return choose_topology(settings.ep, settings.dp, settings.cp, environment, devices)


class EngineGroup:
    """Has the interface of `Engine`. In the process of rank 0 it leads; other launchers call it alike and follow."""

    def __init__(self, directory: Path, environment: Environment, settings: EngineConfig, topology: Topology) -> None:
        """Start this launcher's ranks and load their parts; errors are those of `Engine`, and `RankError`."""
        ModelConfig.from_file(directory / CONFIG_FILE)
        if topology.launchers > 1 and topology.local > 1 and topology.nodes < topology.launchers:
            raise ConfigError(
                f"{topology.ranks} ranks, {topology.launchers} launchers, several a node: take one a node or one a rank"
            )
        self._topology, self._turn, self._calls = topology, Lock(), 0
        first = topology.local * (environment.launcher or 0)
        host, port, listener = _meeting_place(environment, topology)
        orders = Orders(first, topology, host, port, directory, environment, settings)
        self.children = children = Children(first, topology.ranks)
        self._ranks = Ranks(
            first, topology.ranks, host, port, listener=listener, on_failure=children.kill, alive=children.lost
        )
        self._finalizer = weakref.finalize(self, _leave, self._ranks, children)
        try:
            devices = _visible_devices(environment) if environment.accelerator == "nvidia" else []
            children.start(orders, topology.local - 1, devices)
            _, self._engine = join(orders, self._ranks)
        except BaseException as error:
            if not isinstance(error, RankError):
                self._ranks.fail(f"rank {first} of {topology.ranks} failed: {type(error).__name__}: {error}")
            self._finalizer()
            raise
        self._leads = first == 0
        self._follower = Follower(self._ranks, self._engine)
        self._spreader = Spreader(topology.dp, settings.page_size)
        self._others: dict[int, EngineStatistics] = {}
        self.config, self.tokenizer = self._engine.config, self._engine.tokenizer
        self.admission = self._engine.admission

    @property
    def statistics(self) -> EngineStatistics:
        """What all ranks have done up to the last call."""
        return merged([self._engine.statistics, *self._others.values()])

    def run(
        self, requests: Sequence[Request], on_step: OnStep, on_output: OnOutput | None = None
    ) -> list[RequestOutput]:
        """As `Engine.run`; the tokens of other ranks are told when their request has ended."""
        with self._turn:
            self._ranks.check()
            call, self._calls = self._calls, self._calls + 1
            if not self._leads:
                return self._follow(call, len(requests))
            return self._lead(call, requests, on_step, on_output)

    def close(self) -> None:
        """Copy what is worth keeping to the tiers that survive the process."""
        with self._turn:
            self._ranks.check()
            call, self._calls = self._calls, self._calls + 1
            if not self._leads:
                self._follower.serve_call()
                return
            for rank in range(1, self._ranks.size):
                self._ranks.publish(call_key(call, rank), None)
            self._engine.close()
            gathering = _Gathering(call, (), lambda _: None, None)
            self._wait(gathering)

    def _lead(
        self, call: int, requests: Sequence[Request], on_step: OnStep, on_output: OnOutput | None
    ) -> list[RequestOutput]:
        shares = self._shares(requests)
        for rank in range(1, self._ranks.size):
            self._ranks.publish(call_key(call, rank), [Parcel.pack(request) for request in shares[rank]])
        gathering = _Gathering(call, requests, on_step, on_output)

        def stepped(rows: list[Running]) -> None:
            on_step(rows)
            self._collect(gathering)

        try:
            gathering.outputs += self._engine.run(shares[0], stepped, on_output)
            while self._engine.stand_by():
                self._collect(gathering)
            self._wait(gathering)
        except RankError:
            raise
        except BaseException:
            self._cancel(gathering)
            raise
        outputs = sorted(gathering.outputs, key=lambda output: gathering.places[output.index])
        if self._topology.launchers > 1:
            self._ranks.publish(result_key(call), outputs)
            if call:
                self._ranks.drop(result_key(call - 1))
        return outputs

    def _follow(self, call: int, count: int) -> list[RequestOutput]:
        """Do this rank's part of a call that all launchers make, and return what the leader does."""
        self._follower.serve_call()
        outputs: list[RequestOutput] = self._ranks.take(result_key(call))
        if len(outputs) != count:
            raise self._ranks.fail(f"launchers differ: rank 0 was given {len(outputs)} requests, another one {count}")
        return outputs

    def _shares(self, requests: Sequence[Request]) -> list[list[Request]]:
        """For each rank; of a group that shares prompts its first rank, which leads, has them all."""
        jobs = [Job(content_keys(request), request.params.max_tokens or _UNKNOWN_LENGTH) for request in requests]
        shares: list[list[Request]] = [[] for _ in range(self._ranks.size)]
        for request, group in zip(requests, self._spreader.spread(jobs), strict=True):
            shares[group * self._topology.cp].append(request)
        return shares

    def _wait(self, gathering: "_Gathering") -> None:
        """Until all other ranks are done with the call."""
        while len(gathering.done) < self._ranks.size - 1:
            self._ranks.check()
            self._collect(gathering)
            time.sleep(_PAUSE)

    def _collect(self, gathering: "_Gathering") -> None:
        for rank, letter in self._ranks.mail():
            if isinstance(letter, Answer):
                gathering.take(letter)
            elif isinstance(letter, Done) and letter.call == gathering.call:
                gathering.done.add(rank)
                assert isinstance(letter.statistics, EngineStatistics)
                self._others[rank] = letter.statistics

    def _cancel(self, gathering: "_Gathering") -> None:
        """Have all ranks drop their requests of a call that was interrupted here; they can then take the next."""
        gathering.silence()
        try:
            self._ranks.publish(cancel_key(gathering.call), True)
            while self._engine.stand_by():
                pass
            self._wait(gathering)
            self._ranks.drop(cancel_key(gathering.call))
        except RankError:
            raise
        except BaseException as error:
            self._ranks.fail(f"rank 0 was interrupted while the ranks ended a call ({type(error).__name__})")
            raise


class _Gathering:
    """What comes in for one call."""

    def __init__(self, call: int, requests: Sequence[Request], on_step: OnStep, on_output: OnOutput | None) -> None:
        self.call = call
        self.requests = {request.index: request for request in requests}
        self.places = {request.index: place for place, request in enumerate(requests)}
        self.outputs: list[RequestOutput] = []
        self.done: set[int] = set()
        self._on_step, self._on_output = on_step, on_output

    def take(self, answer: Answer) -> None:
        """Complete an output of another rank and pass it on; one of an earlier, interrupted call is dropped."""
        if answer.call != self.call:
            return
        request = self.requests[answer.output.index]
        output = complete(answer.output, request)
        self.outputs.append(output)
        self._on_step(_rows(request, output))
        if self._on_output is not None:
            self._on_output(output)

    def silence(self) -> None:
        """Tell nobody any more."""
        self._on_step, self._on_output = lambda _: None, None


def complete(output: RequestOutput, request: Request) -> RequestOutput:
    """The output with its prompt."""
    return RequestOutput(**{**vars(output), "prompt": request.prompt, "prompt_token_ids": request.token_ids})


def _rows(request: Request, output: RequestOutput) -> list[Running]:
    """A request's tokens as steps would have told them: one each, the last of which ends it."""
    rows: list[Running] = []
    for completion in output.outputs:
        count = max(1, completion.num_tokens)
        rows += [Running(request, 0, (), count) for _ in range(count)]
        rows[-1].finish_reason = completion.finish_reason
    return rows


def _meeting_place(environment: Environment, topology: Topology) -> tuple[str, int, socket.socket | None]:
    """Host, port, and rank 0's socket there if it listens already."""
    if topology.launchers == 1:
        return "127.0.0.1", *free_port()
    host = "127.0.0.1" if topology.nodes == 1 else environment.meeting_host
    if environment.agent_store:
        return host, *agreed_port(environment.meeting_host, environment.meeting_port, not environment.launcher)
    return host, environment.meeting_port, None


def _visible_devices(environment: Environment) -> list[str]:
    if environment.visible_devices is None:
        return [str(number) for number in range(torch.cuda.device_count())]
    return [name for name in environment.visible_devices.split(",") if name.strip()]


def _leave(ranks: Ranks, children: Children) -> None:
    """End the ranks that this process started."""
    ranks.close()
    children.end()
