"""Starts the ranks of a run on this machine, each a process with its share of the devices."""

import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from deepinfer.config.envs import Environment
from eval.harness.errors import EvalError

_DEVICES = {"nvidia": "CUDA_VISIBLE_DEVICES", "ascend": "ASCEND_RT_VISIBLE_DEVICES"}


def launch(script: Path, arguments: Sequence[str], ranks: int, environment: Environment) -> int:
    """Run `script` once a rank with `--rank` and `--world`, wait for all, return the worst exit status.

    A rank that fails stops no other: what they finish is kept, and the next run makes the rest.
    """
    settings = rank_settings(ranks, environment)
    processes = [
        subprocess.Popen(
            ["env", *settings[rank], sys.executable, str(script), *arguments, *_place(rank, ranks)],
            stdout=subprocess.DEVNULL,
        )
        for rank in range(ranks)
    ]

    def pass_on(number: int, frame: FrameType | None) -> None:
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return max(_status(process.wait()) for process in processes)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _place(rank: int, ranks: int) -> list[str]:
    """The options that override the launcher's own: the last one of a name counts."""
    return ["--dp", "1", "--rank", str(rank), "--world", str(ranks)]


def _status(code: int) -> int:
    """As a shell tells it: 128 and the signal for a process that one ended."""
    return 128 - code if code < 0 else code


def rank_settings(ranks: int, environment: Environment) -> list[list[str]]:
    """For each rank the variables to set, as `NAME=value`: its devices, or its part of the CPU's threads."""
    if environment.accelerator == "cpu":
        import torch

        return [[f"OMP_NUM_THREADS={max(1, torch.get_num_threads() // ranks)}"]] * ranks
    devices = _devices(environment)
    if not devices or len(devices) % ranks:
        raise EvalError(f"--dp is {ranks}; the {len(devices)} visible devices must be a multiple of it")
    share = len(devices) // ranks
    name = _DEVICES[environment.accelerator]
    return [[f"{name}={','.join(devices[rank * share : (rank + 1) * share])}"] for rank in range(ranks)]


def _devices(environment: Environment) -> list[str]:
    if environment.accelerator == "nvidia" and environment.visible_devices is not None:
        return [device for device in environment.visible_devices.split(",") if device]
    from deepinfer.engine.device import select_device

    device = select_device(environment.accelerator)
    import torch

    return [str(number) for number in range(torch.get_device_module(device).device_count())]
