"""Entry point of `deepinfer`: finds the subcommand, runs it, and turns every error of the user's into one line."""

import argparse
import os
import sys
from collections.abc import Sequence

from deepinfer.cli import calibrate, generate, info, memory, profile
from deepinfer.config.envs import describe_environment
from deepinfer.core.errors import DeepInferError

COMMANDS = (generate, info, memory, profile, calibrate)
ERROR = 2  # argparse's own exit code for a bad command line
STOPPED = 130  # what shells report for a command that an interrupt ended


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line; a subcommand's namespace carries its `run`."""
    parser = argparse.ArgumentParser(
        prog="deepinfer",
        description="Inference for DeepSeek-V4.1-Flash.",
        epilog="environment variables:\n" + describe_environment(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_command(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. Errors go to stderr in one line."""
    arguments = build_parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
        sys.stdout.flush()
        return code
    except DeepInferError as error:
        print(f"deepinfer {arguments.command}: error: {error}", file=sys.stderr)
        return ERROR
    except KeyboardInterrupt:
        print(f"deepinfer {arguments.command}: stopped", file=sys.stderr)
        return STOPPED
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
