"""The rank processes that a launcher starts."""

import pickle
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

from deepinfer.config.envs import child_environment
from deepinfer.engine.follower import Orders


class Children:
    """Starts them, sees when one is lost, and ends them."""

    def __init__(self, first: int, ranks: int) -> None:
        """`first`: the rank of the launcher itself, after which its children are numbered; `ranks`: all there are."""
        self.processes: list[subprocess.Popen[bytes]] = []
        self._first, self._ranks = first, ranks

    def start(self, orders: Orders, count: int, devices: Sequence[str]) -> None:
        """Start `count` ranks after the launcher's, each with one of the `devices` to see; none of them on CPUs."""
        for place in range(1, count + 1):
            changes = {"CUDA_VISIBLE_DEVICES": devices[place]} if devices else {}
            child = subprocess.Popen(
                [sys.executable, "-c", "from deepinfer.engine.follower import main; main()"],
                stdin=subprocess.PIPE,
                env=child_environment(**changes),
                start_new_session=True,  # an interrupt from the keyboard is for the leader, which tells the others
            )
            self.processes.append(child)
            assert child.stdin is not None
            child.stdin.write(pickle.dumps(replace(orders, rank=self._first + place)))
            child.stdin.flush()

    def lost(self) -> str | None:
        """What became of one that has ended; None if all are there."""
        for place, child in enumerate(self.processes, 1):
            code = child.poll()
            if code is not None:
                how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
                return f"rank {self._first + place} of {self._ranks} {how}"
        return None

    def kill(self, reason: str) -> None:
        """End all at once; they have no say."""
        for child in self.processes:
            child.kill()

    def end(self) -> None:
        """Close what they listen to, upon which they end by themselves."""
        for child in self.processes:
            if child.stdin is not None:
                child.stdin.close()
        for child in self.processes:
            try:
                child.wait(timeout=5)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
