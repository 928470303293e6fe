"""Checks and times what ranks do together, on GPUs over NCCL or on CPUs over gloo.

    DEEPINFER_ACCELERATOR=nvidia python scripts/check_parallel.py              # two GPUs, about two minutes
    python scripts/check_parallel.py --quick                                   # two processes on a CPU

1. Exchange: experts on two ranks give what the same experts give on one, for dense and for quantised weights.
2. Time of dispatch and combine of a layer of the released shape (hidden size 5,120, 384 experts, 6 a row), experts left
   out, against the bound: bytes that leave a GPU over the bandwidth of a large exchange of the same run.
3. Engine: `LLM(ep=2)` against one process, greedy, FP32: share of equal replies; steps a second of both.
4. A rank is killed while it serves: seconds until the call ends with its error.
5. Context parallel: `LLM(cp=2)`, with and without shared experts, against one process, with prompts long enough to be
   cut: share of equal replies; seconds to the first token of a long prompt; then a rank is killed.

Exits with 0 if all checks hold. Needs no network and no file beside the project's.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed
from torch import Tensor

import deepinfer.parallel.experts
from deepinfer import LLM, SamplingParams
from deepinfer.checkpoint.locate import resolve_model
from deepinfer.checkpoint.random import RandomCheckpoint
from deepinfer.checkpoint.reader import CONFIG_FILE
from deepinfer.config.envs import read_environment
from deepinfer.config.model import ModelConfig
from deepinfer.core.errors import RankError
from deepinfer.model.loading import Form, load_routed
from deepinfer.model.weights import ExpertWeights
from deepinfer.ops.experts import routed_experts
from deepinfer.parallel.collectives import Collectives
from deepinfer.parallel.experts import ExpertTable, SharedExperts
from deepinfer.parallel.placement import first_placement
from deepinfer.parallel.ranks import free_port

RANKS = 2
HIDDEN, EXPERTS, CHOSEN = 5120, 384, 6
LIMIT = 10.0
SIZES = (1, 16, 64, 256, 1024, 4096)
QUICK_SIZES = (1, 16, 64)
dist: Any = torch.distributed


def median_seconds(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    times = []
    for _ in range(repeats + 3):
        if device.type == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return sorted(times[3:])[repeats // 2]


def visits(rows: int, experts: int, count: int, device: torch.device, seed: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(seed)
    chosen = torch.rand(rows, experts, generator=source).topk(count).indices
    return chosen.to(device), torch.rand(rows, count, generator=source).to(device)


def weights_of(
    checkpoint: RandomCheckpoint, held: list[int], dtype: torch.dtype, keep: bool, device: torch.device
) -> ExpertWeights:
    w13, w2 = load_routed(checkpoint, 0, held, Form(dtype, device, keep))
    nothing = torch.empty(0)
    return ExpertWeights(nothing, nothing, nothing, w13, w2, nothing, nothing)


def check_exchange(collectives: Collectives, device: torch.device) -> bool:
    """Random experts of the bundled checkpoint's shape; each rank sends rows of its own, one of them none."""
    config = ModelConfig.from_file(resolve_model(None) / CONFIG_FILE)
    checkpoint = RandomCheckpoint(config, device)
    experts, good = config.n_routed_experts, True
    placement = first_placement(experts, RANKS, RANKS)
    for dtype, keep in ((torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)):
        everything = weights_of(checkpoint, list(range(experts)), dtype, keep, device)
        own = weights_of(checkpoint, placement.experts[collectives.rank].tolist(), dtype, keep, device)
        shared = SharedExperts(ExpertTable(placement, experts, device), collectives)
        worst = 0.0
        for rows in (0, 1, 37, 200):
            rows = rows if collectives.rank == 0 else (rows * 3) // 2
            chosen, routing = visits(rows, experts, config.num_experts_per_tok, device, collectives.rank)
            h = torch.randn(rows, config.hidden_size, device=device).to(dtype)
            got = shared(h, chosen, routing, own, LIMIT)(partial(torch.zeros_like, h))
            if rows:
                wanted = routed_experts(h, chosen, routing, everything.w13, everything.w2, LIMIT)
                worst = max(worst, float((got.float() - wanted.float()).norm() / wanted.float().norm()))
        limit = 1e-5 if dtype is torch.float32 else 0.01
        good &= worst <= limit
        if collectives.rank == 0:
            name = f"{str(dtype)[6:]}{', quantised' if keep else ''}"
            print(f"exchange   {name}: relative error {worst:.1e} (limit {limit})")
    return good


def link_bandwidth(collectives: Collectives, device: torch.device, size: int) -> float:
    """Bytes a second out of one rank in a large exchange, in both directions at once."""
    data = torch.empty(size, 1024, dtype=torch.uint8, device=device)
    other = [0 if rank == collectives.rank else size for rank in range(RANKS)]
    seconds = median_seconds(lambda: collectives.send_rows(data, other, other)(), device, 10)
    return size * 1024 / seconds


def time_exchange(collectives: Collectives, device: torch.device, quick: bool) -> None:
    """Dispatch and combine alone: in place of the experts' work every visit gets its own row back."""
    placement = first_placement(EXPERTS, 0, RANKS)
    shared = SharedExperts(ExpertTable(placement, EXPERTS, device), collectives)
    link = link_bandwidth(collectives, device, (1 << 14) if quick else (1 << 20))
    empty = torch.empty(0, device=device)
    deepinfer.parallel.experts.routed_experts = lambda x, *_: x
    if collectives.rank == 0:
        print(f"\na large exchange: {link / 1e9:.1f} GB/s out of each rank\n")
        print("| rows a rank | rows travel in | bytes out | time, us | bound, us | time / bound |")
        print("|---|---|---|---|---|---|")
    for rows in QUICK_SIZES if quick else SIZES:
        for experts in (empty, Quantised()):
            time_rows(rows, experts, shared, collectives, link, 10 if quick else 30)


def time_rows(
    rows: int, experts: Any, shared: SharedExperts, collectives: Collectives, link: float, repeats: int
) -> None:
    """Print a line of the table; `experts` decide in which form rows travel."""
    device, fp8 = shared.table.copies.device, not isinstance(experts, Tensor)
    h = torch.randn(rows, HIDDEN, device=device).to(torch.bfloat16)
    chosen, routing = visits(rows, EXPERTS, CHOSEN, device, collectives.rank)
    nothing = torch.empty(0)
    weights = ExpertWeights(nothing, nothing, nothing, experts, experts, nothing, nothing)
    seconds = median_seconds(lambda: shared(h, chosen, routing, weights, LIMIT)(lambda: h), device, repeats)
    away = chosen // (EXPERTS // RANKS) != collectives.rank
    row = HIDDEN * (1 if fp8 else 2) + (4 if fp8 else 0) + 8 * CHOSEN
    size = int(away.any(1).sum()) * row + int(away.sum()) * 2 * HIDDEN
    if collectives.rank == 0:
        bound = size / link
        cells = f"{size:,} | {seconds * 1e6:,.0f} | {bound * 1e6:,.1f} | {seconds / bound:,.1f}"
        print(f"| {rows:,} | {'FP8' if fp8 else 'BF16'} | {cells} |", flush=True)


class Quantised:
    """Stands for quantised weights where nobody multiplies by them."""


def rank_main(rank: int, port: int, quick: bool) -> int:
    device = torch.device("cpu")
    if read_environment().accelerator == "nvidia":
        torch.cuda.set_device(rank)
        device = torch.device("cuda", rank)
    store = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=60))
    collectives = Collectives(store, rank, RANKS, device, True, timedelta(seconds=60))
    with torch.inference_mode():
        good = check_exchange(collectives, device)
        time_exchange(collectives, device, quick)
    collectives.most([0])
    return 0 if good else 1


def exchange(quick: bool) -> bool:
    port, listener = free_port()
    store = dist.TCPStore("127.0.0.1", port, None, True, wait_for_workers=False, master_listen_fd=listener.detach())
    command = [sys.executable, __file__, *(["--quick"] if quick else []), "--port", str(port), "--rank"]
    ranks = [subprocess.Popen([*command, str(rank)]) for rank in range(RANKS)]
    codes = [rank.wait(timeout=100) for rank in ranks]
    del store
    return codes == [0] * RANKS


def answers(llm: LLM, prompts: list[list[int]], tokens: int) -> tuple[list[tuple[int, ...]], float]:
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    llm.generate(prompts[:2], params, use_tqdm=False)
    before, begin = llm.statistics.scheduler.steps, time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    return [output.token_ids for output in outputs], (llm.statistics.scheduler.steps - before) / seconds


def engine(quick: bool) -> bool:
    source = torch.Generator().manual_seed(0)
    prompts = [torch.randint(5, 250, (40 + 11 * n,), generator=source).tolist() for n in range(8)]
    tokens = 8 if quick else 32
    settings: dict[str, Any] = {
        "dtype": "float32",
        "keep_quantized": False,
        "prefix_cache": False,
        "cache_bytes": 1 << 29,
    }
    alone = LLM(**settings)
    one, one_steps = answers(alone, prompts, tokens)
    llm = LLM(**settings, ep=RANKS, rebalance_steps=8)
    two, two_steps = answers(llm, prompts, tokens)
    equal = sum(map(tuple.__eq__, one, two))
    print(f"\nengine     {equal} of {len(one)} replies equal")
    print(f"           steps/s: one process {one_steps:.1f}, {RANKS} ranks {two_steps:.1f} in all")
    good = equal >= len(one) - 1 and killed(llm, prompts)
    del llm
    return context(alone, settings, quick) and good


def context(alone: LLM, settings: dict[str, Any], quick: bool) -> bool:
    """Prompts that two ranks share."""
    source = torch.Generator().manual_seed(1)
    lengths = [60, 130, 500 if quick else 1500]
    prompts = [torch.randint(5, 250, (length,), generator=source).tolist() for length in lengths]
    wanted, _ = answers(alone, prompts, 8)
    good, base = True, first_token(alone, prompts[-1])
    print()
    for shares, name in ((1, "experts on every rank"), (RANKS, "experts shared")):
        llm = LLM(**settings, dp=1, cp=RANKS, ep=shares)
        made, _ = answers(llm, prompts, 8)
        equal = sum(map(tuple.__eq__, wanted, made))
        seconds = first_token(llm, prompts[-1])
        print(f"context    {name}: {equal} of {len(made)} replies equal; first token of {lengths[-1]:,}: "
              f"{seconds:.3f} s, one process {base:.3f} s")  # fmt: skip
        good &= equal >= len(made) - 1
        good &= killed(llm, [*prompts, *prompts])
        del llm
    return good


def first_token(llm: LLM, prompt: list[int]) -> float:
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    return median_seconds(lambda: llm.generate([prompt], params, use_tqdm=False), torch.device("cpu"), 3)


def killed(llm: LLM, prompts: list[list[int]]) -> bool:
    victim = llm._engine.children.processes[0]  # type: ignore[union-attr]
    begin = 0.0

    def kill(_: object) -> None:
        nonlocal begin
        begin = begin or time.perf_counter()
        os.kill(victim.pid, signal.SIGKILL)

    tokens = [2 + 200 * (n > 0) for n in range(len(prompts))]
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in tokens]
    try:
        llm.generate(prompts, params, use_tqdm=False, on_output=kill)
    except RankError as error:
        print(f"killed     a rank: {time.perf_counter() - begin:.1f} s later the call ended: {error}")
        return True
    print("killed     a rank, and the call ended well: that cannot be")
    return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes, for a CPU")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        return rank_main(options.rank, options.port, options.quick)
    good = exchange(options.quick)
    good &= engine(options.quick)
    print("all checks hold" if good else "a check FAILED", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
