"""`deepinfer info`: a model's shape, schedules and tensors, and whether its checkpoint is whole."""

import argparse
from pathlib import Path
from typing import Any

from deepinfer.cache.layout import CacheLayout
from deepinfer.checkpoint.layout import TensorSpec
from deepinfer.checkpoint.reader import Checkpoint
from deepinfer.cli.models import MODEL_HELP, find_model
from deepinfer.cli.schedules import schedules
from deepinfer.cli.shape import shape
from deepinfer.cli.table import print_bytes, print_facts
from deepinfer.cli.weights import weight_bytes

_ABOUT = "a model's shape, schedules and tensors, and whether its checkpoint is complete"


def add_command(commands: Any) -> None:
    """Add `info` to the subcommands."""
    parser = commands.add_parser("info", help=_ABOUT, description=f"Shows {_ABOUT}.")
    parser.add_argument("model", nargs="?", metavar="MODEL", help=MODEL_HELP)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print what is known; CheckpointError for a checkpoint that is not complete."""
    model = find_model(arguments.model)
    layout = model.layout()
    print(model.title)
    print_facts("shape", shape(model.config))
    print_facts("layers", schedules(model.config))
    print_facts("cache", {"global KV": f"{CacheLayout.from_config(model.config).bytes_per_token} bytes a token"})
    print_bytes(f"{len(layout):,} tensors, by part", weight_bytes(layout))
    print_bytes("by storage", _storage_bytes(layout))
    print(f"\ncheckpoint: {_completeness(model.directory)}")
    return 0


def _storage_bytes(layout: dict[str, TensorSpec]) -> dict[str, int]:
    totals: dict[str, int] = {}
    for spec in layout.values():
        totals[spec.storage.name] = totals.get(spec.storage.name, 0) + spec.stored_bytes
    return totals


def _completeness(directory: Path | None) -> str:
    """Compare every shard's header with the layout."""
    if directory is None:
        return "none, this is a shape only"
    Checkpoint(directory).check()
    return "complete; every tensor has the shape and the storage that the configuration asks for"
