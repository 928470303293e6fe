"""Goes on training a checkpoint's target for a while on a CPU, with short rows full of recall.

    python -m train.refine --minutes 25 --checkpoint checkpoints/mini --out train/runs/refined

Compressors may start over as copies of their layer's window projection (`--copy_window`): a compressed entry then is
what the layer's window would hold of that token, which its queries know how to read, only farther away.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from torch import Tensor

from deepinfer.text.tokenizer import Tokenizer
from train import accelerate
from train import stream as data
from train.drafter import write
from train.loop import Inputs, Variant
from train.operators import STATE
from train.stream import RECALL
from train.target import Trainer, forward, load_checkpoint


def copy_window(trainer: Trainer) -> None:
    """Let every compressor begin as its layer's window projection and norm."""
    with torch.no_grad():
        for layer in trainer.config.kv_source_layer_ids:
            name, masters = f"layers.{layer}.attn.", trainer.masters.masters
            masters[name + "compressor.wkv.weight"].copy_(masters[name + "wkv.weight"])
            masters[name + "compressor.norm.weight"].copy_(masters[name + "kv_norm.weight"])
    trainer.masters.write()


def recall(trainer: Trainer, batch: Inputs, digits: Tensor) -> float:
    """Share of the digits in replies that the model predicts; copying them from afar is what is to be learned."""
    with torch.no_grad():
        STATE.begin(sparse=False)
        choices = forward(trainer.model, batch, trainer.canvas).logits[:, :-1].argmax(-1)
    targets = batch["ids"][:, 1:]
    counted = (batch["loss_weight"][:, :-1] == 1) & torch.isin(targets, digits)
    return ((choices == targets) & counted).sum().item() / max(1, counted.sum().item())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoints/mini"))
    parser.add_argument("--out", type=Path, default=Path("train/runs/refined"), help="checkpoint directory to write")
    parser.add_argument("--data", type=Path, default=Path("train/data"))
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--peak", type=float, default=6e-4)
    parser.add_argument("--sparse_after", type=float, default=0.7, help="share of the time after which selection is on")
    parser.add_argument("--copy_window", action="store_true")
    arguments = parser.parse_args()
    accelerate.install(compiled=False)
    trainer = Trainer(arguments.checkpoint, "cpu", arguments.peak)
    load_checkpoint(trainer, arguments.checkpoint)
    if arguments.copy_window:
        copy_window(trainer)
    vision = trainer.config.vision
    assert vision is not None
    data.STEP_TOKENS, data.IMAGES = arguments.rows * arguments.tokens, 2 * arguments.rows
    pack = data.settings(arguments.data, arguments.checkpoint, vision, arguments.tokens, RECALL)
    batches = data.loader(pack, int(time.time()), 0, False)
    tokenizer = Tokenizer.from_file(arguments.checkpoint)
    digits = torch.tensor([tokenizer.encode(digit)[-1] for digit in "0123456789"], dtype=torch.int32)
    held = next(batches)
    started = time.time()
    while (passed := (time.time() - started) / (60 * arguments.minutes)) < 1:
        sparse = passed > arguments.sparse_after and trainer.steps % 4 != 0
        trainer.steps += 180 if trainer.steps == 0 else 0  # a short warm-up: the weights are trained already
        report = trainer.run(next(batches), Variant(arguments.tokens, sparse), passed)
        if trainer.steps % 20 == 0:
            values = [round(value, 3) for value in report.tolist()]
            row = {"step": trainer.steps, "progress": round(passed, 3), "report": values}
            print(json.dumps(row | {"recall": round(recall(trainer, held, digits), 3)}), flush=True)
    write(trainer, arguments.out, arguments.checkpoint)


if __name__ == "__main__":
    main()
