"""`deepinfer memory`: what a model, its caches and a step cost, and how many tokens fit."""

import argparse
from typing import Any

from deepinfer.cache.budget import CacheSizes
from deepinfer.cli.models import MODEL_HELP, find_model
from deepinfer.cli.ranks import group_bytes, rank_layout, wire_bytes
from deepinfer.cli.table import print_bytes
from deepinfer.cli.units import parse_bytes, parse_count, parse_positive, show_bytes
from deepinfer.cli.weights import ENGRAM_TABLES, resident_bytes, weight_bytes
from deepinfer.cli.workspace import workspace_bytes
from deepinfer.config.engine import DTYPES, TABLE_PLACES, EngineConfig
from deepinfer.config.envs import read_environment
from deepinfer.config.model import ModelConfig
from deepinfer.parallel.topology import Topology, choose_topology

_ABOUT = "what weights, caches and workspace cost, and how many tokens fit into a given memory"
_BYTES = {"float32": 4, "bfloat16": 2}


def add_command(commands: Any) -> None:
    """Add `memory` to the subcommands."""
    parser = commands.add_parser("memory", help=_ABOUT, description=f"Shows {_ABOUT}.")
    usual = EngineConfig()

    def number(flag: str, default: int | None, about: str) -> None:
        parser.add_argument(flag, type=parse_positive, default=default, metavar="N", help=about)

    parser.add_argument("--model", help=MODEL_HELP)
    number("--context", None, "tokens a request (default: all that the model can take)")
    number("--requests", usual.max_num_seqs, "requests at once (default: %(default)s)")
    parser.add_argument("--memory", type=parse_bytes, metavar="SIZE", help="memory to fill, such as 24GiB")
    number("--page-size", usual.page_size, "tokens a page, an even number (default: %(default)s)")
    number("--rows", usual.max_num_batched_tokens, "most rows a step (default: %(default)s)")
    number("--verify-rows", None, "rows a request may verify in a step (default: the drafter's block + 1)")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of activations (default: %(default)s)")
    number("--ep", None, "ranks that share the routed experts: all, or 1")
    number("--dp", None, "groups of ranks with requests of their own; --requests and --rows are those of one")
    number("--cp", 1, "ranks of a group, which share prompts' rows and all hold their KV (default: %(default)s)")
    parser.add_argument("--extra-experts", type=parse_count, default=0, metavar="N", help="copies of experts, a layer")
    parser.add_argument("--engram-tables", choices=TABLE_PLACES, default="device", help="where Engram tables lie")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the account."""
    model, requests, dtype = find_model(arguments.model), arguments.requests, arguments.dtype
    verified = arguments.verify_rows or 1 + model.config.dspark_block_size
    sizes = CacheSizes(model.config, requests, arguments.page_size, verified)
    context = arguments.context or model.config.max_position_embeddings
    topology = choose_topology(arguments.ep, arguments.dp, arguments.cp, read_environment({}), None)
    on_host = arguments.engram_tables == "host"
    pages = sizes.pages_for(context, requests)
    layout = rank_layout(model.layout(), model.config, topology, arguments.extra_experts, on_host)
    stored, resident = weight_bytes(layout), resident_bytes(layout, _BYTES[dtype])
    rows = max(
        -(-arguments.rows // topology.cp), min(arguments.rows, requests * verified)
    )  # decode rows are not shared
    workspace = workspace_bytes(model.config, rows, context, requests, _BYTES[dtype])
    print(f"{model.title}\n{requests:,} requests of {context:,} tokens, steps of {arguments.rows:,} rows, {dtype}")
    if topology.ranks > 1:
        print(f"one of {topology.ranks} ranks: ep {topology.ep}, dp {topology.dp}, cp {topology.cp}")
    print_bytes("weights as stored", stored, {ENGRAM_TABLES: "may stay in host memory"})
    print_bytes("weights as the PyTorch operators hold them", {"all": resident})
    print_bytes("caches", {"pages": pages * sizes.page_bytes, **_beside_pages(sizes, pages)}, _notes(sizes, pages))
    print_bytes("workspace of a step (estimate)", workspace)
    if topology.ranks > 1:
        _print_wire(model.config, topology, arguments.rows, requests * verified, on_host)
    if arguments.memory is not None:
        _print_fit(sizes, arguments.memory, stored, resident, sum(workspace.values()))
    return 0


def _print_wire(config: ModelConfig, topology: Topology, rows: int, decode_rows: int, on_host: bool) -> None:
    """Print what leaves a rank: in a prefill step the encoder half runs, in a decode step all layers do.

    The ranks of a group share a prefill step's rows; the rows of a decode step are run by each of them.
    """
    for name, count, layers, shared in (
        (f"prefill step of {rows:,} rows", -(-rows // topology.cp), config.decoder_start, rows),
        (f"decode step of {decode_rows:,} rows", decode_rows, config.num_hidden_layers, 0),
    ):
        sent = wire_bytes(config, count, layers, topology.ep, on_host) if topology.ep > 1 else {}
        if shared:
            sent |= group_bytes(config, shared, topology)
        if sent:
            print_bytes(f"sent to other ranks in a {name}", sent)


def _beside_pages(sizes: CacheSizes, pages: int) -> dict[str, int]:
    return {**sizes.slot_parts(), "page tables": sizes.table_bytes(pages)}


def _notes(sizes: CacheSizes, pages: int) -> dict[str, str]:
    layout = sizes.layout
    ring = f"{layout.ring(sizes.verify_rows)} rows of {layout.window_row} bytes a request"
    return {
        "pages": f"{layout.bytes_per_token} bytes a token; {pages:,} pages of {sizes.page_bytes:,} bytes",
        "windows": f"{layout.layers} layers x {ring}",
        "draft windows": f"{layout.draft_stages} stages x {ring}",
        "pooling pairs": f"{len(layout.pair_layers)} layers",
    }


def _print_fit(sizes: CacheSizes, memory: int, stored: dict[str, int], resident: int, workspace: int) -> None:
    """Print how many tokens of global KV fit into `memory`, for several ideas of what else is in it."""
    tables = stored.get(ENGRAM_TABLES, 0)
    beside = {
        "caches alone": 0,
        "and workspace, weights as stored": workspace + sum(stored.values()),
        "the same, Engram tables elsewhere": workspace + sum(stored.values()) - tables,
        "and workspace, weights as now held": workspace + resident,
    }
    print(f"\ntokens of global KV that fit into {show_bytes(memory)}, beside {sizes.slots:,} requests' windows")
    for name, other in beside.items():
        pages = sizes.pages_in(memory - other)
        missing = other + sizes.total(1) - memory
        why = f"  {show_bytes(missing)} more needed for a first page" if not pages else ""
        print(f"  {name:<36}{pages * sizes.page_size:>20,}{why}")
