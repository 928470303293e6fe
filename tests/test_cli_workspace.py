"""What `deepinfer memory` estimates, against what the model really holds and makes."""

from pathlib import Path

import pytest
import torch
from live_bytes import LiveBytes

from deepinfer.cache.storage import Caches
from deepinfer.checkpoint.locate import bundled_checkpoint
from deepinfer.checkpoint.reader import Checkpoint
from deepinfer.cli.weights import resident_bytes
from deepinfer.cli.workspace import workspace_bytes
from deepinfer.config.released import released_config
from deepinfer.core.plan import Plan, Span
from deepinfer.core.request import Request
from deepinfer.core.sampling_params import SamplingParams
from deepinfer.engine.model_runner import ModelRunner
from deepinfer.model.loading import load_weights
from deepinfer.model.model import InferenceModel
from deepinfer.model.weights import tensors

pytestmark = pytest.mark.slow

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
PAGE = 64
STEPS = {"a prompt": (1, 1024, 1024), "a chunk of a long prompt": (1, 4096, 256), "decode": (16, 4096, 1)}


def measured(dtype: torch.dtype, requests: int, context: int, rows: int) -> tuple[int, int]:
    """(most bytes alive in a step that runs the last `rows` tokens of each context, the estimate)."""
    checkpoint = Checkpoint(bundled_checkpoint())
    config, weights = checkpoint.config, load_weights(checkpoint, dtype)
    each = context // PAGE
    caches = Caches(config, each * requests, requests, PAGE)
    runner = ModelRunner(InferenceModel(config, weights), caches, config.vocab_size)
    first = context - rows
    for number in range(requests):
        runner.admit(number, Request(number, None, (7,) * context, (-1,) * context, (), SamplingParams(), 0))
    spans = tuple(Span(n, n, first, rows, (7 + n,) * rows, 0, 0, 0, 0, True) for n in range(requests))
    pages = {n: tuple(range(n * each, (n + 1) * each)) for n in range(requests)}
    known = [value for value in vars(caches).values() if isinstance(value, torch.Tensor)]
    with torch.inference_mode(), LiveBytes([*tensors(weights), *known, *caches.latents, *caches.index_keys]) as live:
        runner.run(Plan(0, spans, pages))
    return live.peak, sum(workspace_bytes(config, rows * requests, context, requests, dtype.itemsize).values())


@DTYPES
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_the_workspace_estimate_covers_a_step_and_is_not_twice_too_large(
    dtype: torch.dtype, step: tuple[int, int, int]
) -> None:
    peak, estimate = measured(dtype, *step)
    assert 0.95 * peak < estimate < 2 * peak


@DTYPES
def test_weights_in_memory(dtype: torch.dtype, golden_checkpoint: Path) -> None:
    """All but a few vectors, which the model spreads or repeats; it does not hold the drafter."""
    checkpoint = Checkpoint(golden_checkpoint)
    target = {name: spec for name, spec in checkpoint.layout.items() if not name.startswith("mtp.")}
    held = load_weights(checkpoint, dtype).nbytes
    assert abs(resident_bytes(target, dtype.itemsize) - held) < 0.001 * held


def test_the_larger_of_attention_and_experts_counts() -> None:
    config = released_config()
    assert set(workspace_bytes(config, 8192, 1024, 1, 2)) == {"residual streams", "experts", "logits"}
    assert set(workspace_bytes(config, 64, 1_000_000, 64, 2)) == {"residual streams", "attention", "logits"}


def test_a_longer_context_costs_more() -> None:
    config = released_config()
    sizes = [sum(workspace_bytes(config, 64, context, 64, 2).values()) for context in (1000, 10_000, 100_000)]
    assert sizes == sorted(set(sizes))
