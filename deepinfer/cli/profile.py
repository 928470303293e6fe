"""`deepinfer profile`: measures what rounds of speculation cost here, and keeps it beside the checkpoint."""

import argparse
from typing import Any

from deepinfer.checkpoint.locate import resolve_model
from deepinfer.config.engine import EngineConfig
from deepinfer.config.envs import read_environment

_ABOUT = "measures the time of speculative rounds on this machine and keeps it beside the checkpoint"


def add_command(commands: Any) -> None:
    """Add `profile` to the subcommands."""
    parser = commands.add_parser("profile", help=_ABOUT, description=f"{_ABOUT.capitalize()}.")
    parser.add_argument("--model", help="a checkpoint's directory or name (default: as for generate)")
    usual = EngineConfig().max_num_seqs
    about = "most requests at once (%(default)s)"
    parser.add_argument("--max-requests", type=int, default=usual, metavar="N", help=about)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure, print and keep."""
    from deepinfer.engine.engine import Engine  # here: with it comes much that no other command needs
    from deepinfer.speculative.times import save_times

    directory = resolve_model(arguments.model)
    settings = EngineConfig(max_num_seqs=arguments.max_requests, varlen=False)
    platform, measured = Engine(directory, read_environment(), settings).profile()
    print(platform)
    print(f"{'rows':>6}  {'ms':>8}   target")
    for rows, seconds in zip(measured.rows, measured.verify, strict=True):
        print(f"{rows:>6}  {seconds * 1000:>8.2f}")
    print(f"{'requests':>8}  {'ms':>8}   drafts")
    for requests, seconds in zip(measured.requests, measured.draft, strict=True):
        print(f"{requests:>8}  {seconds * 1000:>8.2f}")
    print(f"kept in {save_times(directory, platform, measured)}")
    return 0
