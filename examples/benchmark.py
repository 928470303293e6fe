#!/usr/bin/env python3
"""Speed of prefill and decode, measured on the engine's runner with requests that look like long use.

    python examples/benchmark.py                                              # the bundled model, on a CPU
    python examples/benchmark.py --model released --ep_slice 8 ...            # one rank of the released model, on a GPU

Prefill: prompts of `context_length` tokens of which the last `non_cached_tokens` are new, as many as fill a step of
`prefill_batch_size` rows; what is counted are new tokens. Decode: `decode_num_requests` requests at that context, one
row each and one for each of `nextn` drafts, which are drafted and verified; avg_SPS is steps a second. How many drafts
are accepted is not measured, since random weights know nothing of each other: a share of them, `acceptance`, counts as
accepted, by default all. Both are per data-parallel rank. On a GPU a last line says how long the device waited between
steps when the engine's own loop and scheduler ran them (a profiler looks on, and gaps of over 100 us count).

With `--cp N` it is one rank of a group of N that share prompts (`doc/parallel.md`): batch and requests are those of the
group, and what is measured is this rank's part with copies in place of exchanges; N divides an `ep_slice` above 1.

With `--prompt_mode image` the new tokens are images, which a prefill step encodes before it reads them. Weights are
random for `--model released`; then
`--ep_slice N` keeps 1/N of the experts, each row visits as many as in the whole model, so that the rank serves the
visits that N ranks of equal batches would send it; `extra_experts` are added to those that the N ranks share out.
"""

import argparse
import json
import sys
from dataclasses import replace
from typing import Any

import torch
from benchmarking.bounds import decode_step_seconds, prefill_token_seconds
from benchmarking.idle import measure_idle
from benchmarking.images import parse_size, tower_seconds
from benchmarking.rig import Rig, Shape, make_rig
from benchmarking.steps import decode_plans, prefill_plans, profile, time_decode, time_encoder, time_prefill

from deepinfer.config.released import RELEASED
from deepinfer.core.errors import DeepInferError
from deepinfer.core.plan import Span
from deepinfer.model.weights import tensors


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", help="'released' for the released shape, a checkpoint, or nothing for the default one")
    add("--load_format", choices=("checkpoint", "random"), default="checkpoint", help="random: weights are made up")
    add("--ep_slice", type=int, default=1, help="measure one rank of so many that share the experts")
    add("--cp", type=int, default=1, help="of a group of so many that share prompts; divides ep_slice; no exchanges")
    add("--engram_rows", type=int, default=1 << 20, help="most rows of an Engram table of random weights")
    add("--decode_num_requests", type=int, default=64, help="requests of a decode step; 0: no decode")
    add("--context_length", type=int, default=32768, help="tokens of a request")
    add("--non_cached_tokens", type=int, default=4096, help="of which prefill reads so many")
    add("--prompt_mode", choices=("text", "image"), default="text", help="image: the new tokens are images")
    add("--image_size", default="1302x1302", metavar="WxH", help="of the images, in pixels (default: %(default)s)")
    add("--prefill_batch_size", type=int, default=32768, help="rows of a prefill step; 0: no prefill")
    add("--nextn", type=int, default=5, help="most drafts verified behind a token; 0: no speculation")
    add("--acceptance", type=float, default=1.0, help="share of the drafts that counts as accepted (default: all)")
    add("--extra_experts", type=int, default=32, help="redundant experts of all ranks together; with --ep_slice")
    add("--decode_steps", type=int, default=32, help="timed decode steps")
    add("--prefill_rounds", type=int, default=3, help="how often the prefill steps are timed")
    add("--page_size", type=int, default=64, help="tokens of a page")
    add("--dtype", choices=("float32", "bfloat16"), help="of activations (default: the device's own)")
    add("--no_graphs", action="store_true", help="launch every kernel of a decode step instead of replaying graphs")
    add("--profile", action="store_true", help="print where one step of each kind spends its time")
    add("--json", help="write the results to this file")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    shape = Shape(
        options.model,
        options.load_format == "random" or options.model == RELEASED,
        options.ep_slice,
        options.engram_rows,
        options.page_size,
        options.dtype,
        not options.no_graphs,
        nextn=options.nextn if options.decode_num_requests else 0,
        extra_experts=options.extra_experts,
        cp=options.cp,
    )
    context, new = options.context_length, min(options.non_cached_tokens, options.context_length)
    requests = max(options.decode_num_requests, options.prefill_batch_size // new, 1)
    try:
        picture = parse_size(options.image_size) if options.prompt_mode == "image" else None
        room = (options.decode_steps + 8) * (1 + options.nextn)  # as if all drafts were accepted
        rig = make_rig(replace(shape, picture=picture), requests, context + room)
    except DeepInferError as error:
        print(f"benchmark.py: {error}", file=sys.stderr)
        return 2
    print(
        f"weights {rig.model.weights.nbytes / 1e9:.1f} GB, global KV {rig.caches.layout.bytes_per_token:.0f} B a token"
    )
    results: dict[str, Any] = {**vars(options), "device": _device(rig), "torch": torch.__version__}
    if options.prefill_batch_size:
        results["prefill"] = _prefill(rig, options, context, new)
    if options.decode_num_requests:
        results["decode"] = _decode(rig, options, context)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)
    return 0


def _device(rig: Rig) -> str:
    return torch.cuda.get_device_name() if rig.device.type == "cuda" else "cpu"


def _prefill(rig: Rig, options: argparse.Namespace, context: int, new: int) -> dict[str, float]:
    plans = prefill_plans(rig, context, new, options.prefill_batch_size)
    timing = time_prefill(rig, plans, options.prefill_rounds)
    speed, step = timing.rows / timing.seconds / options.cp, timing.seconds / timing.steps
    made = {"tokens_per_s": speed, "ms_per_step": 1e3 * step, "rows_per_step": timing.rows / timing.steps}
    line = f"prefill: {speed:,.0f} tokens/s/GPU, {1e3 * step:.1f} ms a step of {made['rows_per_step']:,.0f} rows"
    if rig.device.type == "cuda":
        made["bound_tokens_per_s"] = 1 / prefill_token_seconds(rig.config)
        line += f"; bound {made['bound_tokens_per_s']:,.0f} tokens/s"
    print(line)
    if options.prompt_mode == "image":
        made |= _encoder(rig, plans, options.prefill_rounds)
    if options.profile:
        print(profile(rig, plans))
    return made


def _encoder(rig: Rig, plans: list[tuple[Span, ...]], rounds: int) -> dict[str, float]:
    """The vision tower's part of the prefill steps, by itself."""
    timing = time_encoder(rig, plans, rounds)
    step, shown = timing.seconds / timing.steps, timing.rows / timing.steps
    made = {"images_per_s": timing.rows / timing.seconds, "encoder_ms_per_step": 1e3 * step}
    line = f"encoder: {made['images_per_s']:,.1f} images/s/GPU, {1e3 * step:.1f} ms a step of {shown:.0f} images"
    if rig.device.type == "cuda" and rig.model.weights.vision is not None:
        grids = [image.grid for request in rig.requests.values() for image in request.images]
        size = sum(tensor.nbytes for tensor in tensors(rig.model.weights.vision))
        made["encoder_bound_ms_per_step"] = 1e3 * tower_seconds(rig.config, grids, size) / len(plans)
        line += f"; bound {made['encoder_bound_ms_per_step']:.1f} ms"
    print(line)
    return made


def _decode(rig: Rig, options: argparse.Namespace, context: int) -> dict[str, float]:
    requests, steps = options.decode_num_requests, options.decode_steps
    timing = time_decode(rig, requests, context, steps, warmup=4)
    sps, accepted = timing.steps / timing.seconds, rig.drafts * options.acceptance
    speed = sps * requests * (1 + accepted) / options.cp
    made = {"avg_SPS": sps, "ms_per_step": 1e3 / sps, "tokens_per_s": speed, "drafts": rig.drafts}
    line = f"decode: avg_SPS {sps:.1f}, {1e3 / sps:.2f} ms a step, {speed:,.0f} tokens/s/GPU"
    if rig.drafts:
        line += f" (taking {accepted:g} of {rig.drafts} drafts as accepted)"
    if rig.device.type == "cuda":
        rows = requests * (1 + rig.drafts)
        made["bound_ms_per_step"] = 1e3 * decode_step_seconds(rig.config, rig.model.weights, rows)
        line += f"; bound {made['bound_ms_per_step']:.2f} ms a step" + (", drafting not counted" if rig.drafts else "")
    print(line, flush=True)
    if rig.device.type == "cuda":
        try:
            idle = measure_idle(rig, requests, context, steps)
        except (DeepInferError, RuntimeError) as error:  # what was timed before stands
            print(f"loop: its idle time was not measured: {error!r}")
        else:
            made |= {"idle_share": idle.share, "longest_gap_us": idle.longest}
            print(f"loop: the device idle {idle.share:.1%} of the time, {idle.longest:.0f} us at most")
    if options.profile:
        print(profile(rig, list(decode_plans(rig, requests, context, 3))))
    return made


if __name__ == "__main__":
    sys.exit(main())
