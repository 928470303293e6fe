#!/usr/bin/env python3
"""Speed of the vision encoder alone, over sizes of images and images a batch.

    python examples/sweep/ve_sweep.py                                         # the bundled model, on a CPU
    python examples/sweep/ve_sweep.py --model released --device cuda          # the released shape, on a GPU

Random images, prepared beforehand, go through tower and aligner; what is timed begins with their patches in host
memory and ends when the embeddings are there. The median of the rounds counts. Weights are random for `--model
released` or `--load_format random`. The bound, on a GPU, is that of an H200: weights read once, or products at the
16-bit rate.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from benchmarking.images import parse_size, random_image, tower_operations, tower_seconds, vision_of

from deepinfer.checkpoint.locate import resolve_model
from deepinfer.checkpoint.random import RandomCheckpoint
from deepinfer.checkpoint.reader import CONFIG_FILE, Checkpoint
from deepinfer.config.model import ModelConfig
from deepinfer.config.released import RELEASED, released_config
from deepinfer.core.errors import DeepInferError
from deepinfer.engine.device import select_device
from deepinfer.model.loading import load_vision
from deepinfer.model.vision import VisionWeights, embed_images
from deepinfer.model.weights import tensors
from deepinfer.text.images import ImageInput

ACCELERATORS = {"cpu": "cpu", "cuda": "nvidia"}
SIZES = ["546x546", "812x812", "1092x1092", "1302x1302", "1960x784"]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", help="'released' for the released shape, a checkpoint, or nothing for the default one")
    add("--load_format", choices=("checkpoint", "random"), default="checkpoint", help="random: weights are made up")
    add("--device", choices=tuple(ACCELERATORS), default="cpu", help="where to run (default: %(default)s)")
    add("--dtype", choices=("float32", "bfloat16"), help="of weights and activations (default: the device's own)")
    add("--sizes", nargs="+", default=SIZES, metavar="WxH", help="of the images, in pixels (default: %(default)s)")
    add("--batches", nargs="+", type=int, default=[1, 2, 4, 8, 16], metavar="N", help="images a batch")
    add("--rounds", type=int, default=10, help="timed rounds of each case (default: %(default)s)")
    add("--json", type=Path, help="append the results to this file, a line of JSON a case")
    return parser.parse_args(arguments)


def load(options: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> tuple[ModelConfig, VisionWeights]:
    """The configuration, and the weights of tower and aligner alone."""
    checkpoint: Checkpoint | RandomCheckpoint
    if options.model == RELEASED:
        checkpoint = RandomCheckpoint(released_config(), device)
    else:
        directory = resolve_model(options.model)
        if options.load_format == "random":
            checkpoint = RandomCheckpoint(ModelConfig.from_file(directory / CONFIG_FILE), device)
        else:
            checkpoint = Checkpoint(directory)
    vision_of(checkpoint.config)
    return checkpoint.config, load_vision(checkpoint, dtype, device)


@torch.inference_mode()
def seconds(images: Sequence[ImageInput], config: ModelConfig, weights: VisionWeights, rounds: int) -> list[float]:
    """How long each round takes, after one to warm up."""
    device, found = weights.w2.weight.device, []
    for _ in range(rounds + 1):
        begin = time.perf_counter()
        embed_images(images, vision_of(config), weights)
        if device.type == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - begin)
    return found[1:]


def measure(
    config: ModelConfig, weights: VisionWeights, size: str, batch: int, rounds: int, bounded: bool
) -> dict[str, Any]:
    """One case."""
    images = [random_image(vision_of(config), *parse_size(size), seed) for seed in range(batch)]
    grids = [image.grid for image in images]
    median = statistics.median(seconds(images, config, weights, rounds))
    row = {
        "size": size,
        "images": batch,
        "patches": grids[0].patches,
        "tokens": grids[0].tokens,
        "ms": 1e3 * median,
        "images_per_s": batch / median,
        "patches_per_s": batch * grids[0].patches / median,
        "tokens_per_s": batch * grids[0].tokens / median,
        "tflops": tower_operations(config, grids) / median / 1e12,
    }
    if bounded:
        bound = tower_seconds(config, grids, sum(tensor.nbytes for tensor in tensors(weights)))
        row |= {"bound_ms": 1e3 * bound, "share_of_bound": bound / median}
    return row


def show(row: dict[str, Any]) -> str:
    """A line of the table."""
    line = f"{row['size']:>10} {row['images']:6} {row['patches']:8} {row['tokens']:7} {row['ms']:9.2f}"
    line += (
        f" {row['images_per_s']:9.1f} {row['patches_per_s']:11,.0f} {row['tokens_per_s']:10,.0f} {row['tflops']:8.3f}"
    )
    if "bound_ms" in row:
        line += f" {row['bound_ms']:9.2f} {row['share_of_bound']:6.0%}"
    return line


def run(options: argparse.Namespace) -> None:
    """Measure and print every case."""
    device = select_device(ACCELERATORS[options.device])
    dtype = getattr(torch, options.dtype or ("float32" if device.type == "cpu" else "bfloat16"))
    config, weights = load(options, device, dtype)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    size = sum(tensor.nbytes for tensor in tensors(weights))
    print(f"{name}, torch {torch.__version__}, {str(dtype).removeprefix('torch.')}, weights {size / 1e6:,.1f} MB")
    head = "      size images  patches  tokens        ms  images/s   patches/s   tokens/s  TFLOP/s"
    print(head + ("  bound ms  share" if device.type == "cuda" else ""))
    for pixels in options.sizes:
        for batch in options.batches:
            row = measure(config, weights, pixels, batch, options.rounds, device.type == "cuda")
            print(show(row), flush=True)
            if options.json is not None:
                record = {"mode": "encoder", "device": name, "torch": torch.__version__, "dtype": str(dtype), **row}
                with options.json.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(record) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    try:
        run(parse(arguments))
    except (DeepInferError, OSError) as error:
        print(f"ve_sweep.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
