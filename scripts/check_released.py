#!/usr/bin/env python3
"""Checks the released model's shape on a GPU, with random weights: layers by kernels, and recorded decode steps.

python scripts/check_released.py [--lengths 600 2500] [--requests 6]

Layers: each layer's attention gets the same inputs twice, by kernels row by row and by PyTorch's operators group by
group; what it prints are relative differences. Final logits would say nothing: forty random layers turn a rounding into
another routing; for the same reason steps of another shape, whose sums have another order, may choose another token.
Recorded steps: the same greedy tokens as steps of the same shape that are launched kernel by kernel. Exit status 1 if a
layer differs by more than 15% or such a token does.
"""

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from benchmarking.rig import Rig, Shape, make_rig

from deepinfer.config.released import RELEASED
from deepinfer.core.batch import Batch
from deepinfer.core.plan import Plan
from deepinfer.engine.model_runner import ModelRunner
from deepinfer.engine.recorded import Recording
from deepinfer.model.compression import compress, due_entries
from deepinfer.model.experts import mixture
from deepinfer.model.memory import engram
from deepinfer.model.model import InferenceModel
from deepinfer.model.recorder import Recorder
from deepinfer.model.streams import site_mix
from deepinfer.ops.hyper_connections import advance

LIMIT = 0.15
"""Of a layer: both ways round queries to 16 bits, each in its own, and then outputs to FP8, twice; a fault gives 1."""
STEPS = 5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[600, 2500], help="tokens of the prompts")
    parser.add_argument("--requests", type=int, default=6, help="of the recorded steps")
    options = parser.parse_args()
    os.environ["DEEPINFER_ACCELERATOR"] = "nvidia"
    with torch.inference_mode():
        rig = make_rig(Shape(RELEASED, True, 8, 1 << 20, 64), options.requests, max(*options.lengths, 2000) + 64)
        classes = [token % rig.config.engram_compressed_vocab_size for token in range(rig.config.vocab_size)]
        groups = InferenceModel(rig.config, rig.model.weights, classes)
        worst = 0.0
        for length in options.lengths:
            request = rig.admit(0, length)
            rig.caches.newest[0] = 77
            for name, ids, first in (("prompt", request.token_ids, 0), ("decode", None, length)):
                batch = rig.runner.batch([rig.span(0, first, ids, 0, length, True)])
                found = differences(rig, groups, batch)
                worst = max(worst, *found)
                print(f"{name} at {length}: {' '.join(f'{value:.0e}' for value in found)}", flush=True)
        same, shared = recorded_agree(rig, options.requests)
    print(f"steps of exactly {options.requests} rows share {shared:.0%} of their tokens with those of a recorded shape")
    print(f"largest difference of a layer {worst:.1e}; recorded steps {'agree' if same else 'DIFFER'}")
    return int(worst > LIMIT or not same)


def differences(rig: Rig, groups: InferenceModel, batch: Batch) -> list[float]:
    """Relative difference of every layer's attention, both ways from the same input."""
    model, caches, config = rig.model, rig.caches, rig.config
    rows, found = model._enter(batch, caches), []
    reaches = [(one, one._reach(batch.encoder, caches)) for one in (groups, model)]
    for number, layer in enumerate(model.weights.layers):
        if layer.engram is not None and rows.memory is not None:
            streams = engram(rows.x, number, rows.memory, layer.engram, config)
            rows = rows.enter(streams, layer.attention_site, config)
        if number in config.kv_source_layer_ids:
            due = due_entries(config.ratio(number), model._compressed, batch, caches)
            compress(rows.h, number, layer.attention, due, batch, caches, config)
        if number == config.decoder_start:
            rows = rows.of(lambda values: values[batch.decoder_rows])
            reaches = [(one, one._reach(batch.decoder, caches)) for one in (groups, model)]
        for one, reach in reaches:
            if number in config.kv_source_layer_ids:
                one._enter_source(reach, number, caches)
        wanted, y = (one._attention[number](rows.h, reach, caches) for one, reach in reaches)
        found.append(((y.float() - wanted.float()).norm() / wanted.float().norm()).item())
        mix = site_mix(rows.x, layer.attention_site, config)
        x, h = advance(y, rows.x, mix, layer.expert_site.norm, config.rms_norm_eps)
        after = site_mix(x, layer.expert_site, config)
        y = mixture(h, None, config.num_experts_per_tok, layer.experts, config)
        x, h = advance(y, x, after, model._norm_after(number), config.rms_norm_eps)
        rows = replace(rows, x=x, p=after.pre, h=h)
    return found


def recorded_agree(rig: Rig, requests: int) -> tuple[bool, float]:
    """Whether recorded steps, twice, give the tokens that steps of their shape do when they are launched one by one.

    And the share of these tokens that steps of exactly these rows give, too.
    """
    caches, words = rig.caches, rig.config.vocab_size
    launched = ModelRunner(rig.model, caches, words, recording=Recording(rig.model, Recorder(record=False)))
    exact = ModelRunner(rig.model, caches, words)
    for number in range(requests):
        request = rig.admit(number, 2000 + number)
        launched.admit(number, request)
        exact.admit(number, request)
    caches.newest[:requests] = torch.arange(50, 50 + requests, device=rig.device)
    state = [caches.windows, caches.history, caches.pairs, caches.newest, *caches.latents, *caches.index_keys]
    before = [tensor.clone() for tensor in state]

    def tokens(runner: ModelRunner) -> list[list[int]]:
        for tensor, kept in zip(state, before, strict=True):
            tensor.copy_(kept)
        made = []
        for step in range(STEPS):
            ids = [(50 + n,) if step == 0 else None for n in range(requests)]  # which tells the runner where they are
            spans = tuple(rig.span(n, 2000 + n + step, ids[n], 0, 2000 + n, True) for n in range(requests))
            sampled = runner.run(Plan(step, spans))
            if sampled.counts is not None and not bool((sampled.counts > 0).all()):
                raise RuntimeError(f"step {step} left out some of its requests")
            made.append(sampled.tokens.tolist())
        return made

    wanted, others = tokens(launched), tokens(exact)
    shared = sum(a == b for one, two in zip(wanted, others, strict=True) for a, b in zip(one, two, strict=True))
    return all(tokens(rig.runner) == wanted for _ in range(2)), shared / (STEPS * requests)


if __name__ == "__main__":
    sys.exit(main())
