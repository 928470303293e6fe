"""Trains the small checkpoint's target model, in resumable runs of some minutes each, on one GPU.

    python -m train.target --minutes 9 --from 0 --to 0.5 --state /tmp/state.pt --out OUT
    python -m train.target --minutes 9 --from 0.5 --to 1 --state /tmp/state.pt --out OUT
    python -m train.target --minutes 4 --schedule recall --checkpoint checkpoints/mini --peak 1e-3 --out OUT

A run takes training from one share of the schedule to another in the given time, which begins when everything is
compiled. It goes on from the state file if there is one, else from the compact copy in ``--resume`` or the stored
values of ``--checkpoint``. It leaves the state file, and in OUT a compact copy (BF16 masters in four files) and a log.
"""

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from deepinfer.checkpoint.layout import Storage, tensor_layout
from deepinfer.checkpoint.reader import Checkpoint
from deepinfer.config.model import ModelConfig
from deepinfer.reference.loading import load_reference
from deepinfer.reference.model import ForwardOutput, ReferenceModel
from deepinfer.text.engram_classes import engram_classes
from deepinfer.text.tokenizer import Tokenizer
from train import accelerate
from train.canvas import Canvas
from train.digit_images import SIZES
from train.initial import initialise
from train.loop import CapturedStep, Inputs, Outputs, Variant, from_scratch, learning_rate, recall, variants
from train.masked_attention import index_loss
from train.masters import Masters, balance, storages
from train.mini_config import mini_config
from train.operators import STATE
from train.stream import LONG, RECALL, SHORT, STEP_TOKENS, loader, settings

SCHEDULES = {"scratch": (from_scratch, {1024: SHORT, 4096: LONG}), "recall": (recall, {4096: RECALL})}
"""Which kinds of steps to take when, and what their rows hold, by the rows' lengths."""


def forward(model: ReferenceModel, batch: Inputs, canvas: Canvas) -> ForwardOutput:
    """The model on one batch of `train.stream.Stream`."""
    STATE.patch_mask = batch["patch_mask"]
    patches = batch["patches"].to(model.embed.weight.dtype)
    seen = model.vision(patches, canvas.rows, canvas.cols) * batch["patch_mask"][..., None]
    cells = model.aligner(seen, canvas.rows, canvas.cols).flatten(0, 1)[batch["cells"]]
    ids = batch["ids"].long()
    x = model.embed_tokens(ids, batch["types"], cells)
    return model.run_layers(x, ids, batch["types"] != -1, batch["cut"], False, None)


def token_losses(logits: Tensor, ids: Tensor) -> Tensor:
    """Cross-entropy in nats of ids[b, t + 1] at position t: [B, T, vocab] -> [B, T]; the last column is 0."""
    targets = ids[:, 1:].flatten().long()
    losses = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets, reduction="none")
    return torch.nn.functional.pad(losses.view(len(ids), -1), (0, 1))


class Trainer:
    """Owns the model and its masters during a run."""

    def __init__(self, tokenizer_path: Path, device: str, peak: float, seed: int = 0) -> None:
        tokenizer = Tokenizer.from_file(tokenizer_path)
        self.config_json = mini_config(tokenizer)
        self.config = ModelConfig.from_dict(self.config_json, "the small checkpoint's configuration")
        assert self.config.vision is not None
        self.canvas = Canvas(SIZES, self.config.vision)
        self.device, self.peak, self.steps = device, peak, 0
        self.model = ReferenceModel(self.config, engram_classes(tokenizer))
        initialise(self.model, seed)
        self.layout = tensor_layout(self.config, Storage.BF16)
        self.storage = storages(self.model, self.layout)
        named = dict(self.model.named_parameters())
        self.model.to(device)
        biases = {name for name in named if name.endswith(("gate.bias", "gate.bias_vl"))}
        for name in named:
            named[name].requires_grad_(name not in biases and not name.startswith("mtp."))
        trained = {name: p for name, p in named.items() if p.requires_grad}
        self.masters = Masters(trained, self.storage, device, weight_decay=0.05)
        self.biases = {name: named[name] for name in sorted(biases) if not name.startswith("mtp.")}
        self.bias_rate = torch.zeros((), device=device)
        self.pool = torch.cuda.graph_pool_handle() if device != "cpu" else None
        self.captured: dict[Variant, CapturedStep] = {}

    def step_function(self, variant: Variant) -> Any:
        """The whole step of a variant: forward, both losses, backward, update, balance."""

        def step(batch: Inputs) -> Outputs:
            STATE.begin(variant.sparse)
            out = forward(self.model, batch, self.canvas)
            losses, weight = token_losses(out.logits, batch["ids"]), batch["loss_weight"]
            language = (losses * weight).sum() / weight.sum()
            index = index_loss()
            (language + index).backward()
            norm = self.masters.step(clip=1.0)
            balance(STATE.loads, self.bias_rate)
            with torch.no_grad():
                reply = (weight == 1).float()
                right = (out.logits[:, :-1].argmax(-1) == batch["ids"][:, 1:]).float() * reply[:, :-1]
                heavy = torch.stack([load.max(-1).values[0] / load.mean(-1)[0] for _, load in STATE.loads])
                values = (language, index, norm, right.sum() / reply.sum(), heavy.max())
            return {"report": torch.stack([value.detach().float() for value in values])}

        return step

    def prepare(self, batch: Inputs, variant: Variant) -> None:
        """Compile and capture a variant's step; the few updates that this takes change no weight."""
        started = time.time()
        self.masters.lr.fill_(0.0)
        self.bias_rate.fill_(0.0)
        self.captured[variant] = CapturedStep(self.step_function(variant), batch, self.pool, self.device)
        print(f"captured {variant} in {time.time() - started:.0f} s", flush=True)

    def run(self, batch: Inputs, variant: Variant, progress: float) -> Tensor:
        """One step; returns the report: losses, gradient norm, share of weighted targets predicted, load."""
        if variant not in self.captured:
            self.prepare(batch, variant)
        self.masters.lr.fill_(learning_rate(progress, self.steps, self.peak))
        self.bias_rate.fill_(3e-3 * (1 - progress))
        self.steps += 1
        return self.captured[variant](batch)["report"]

    def state(self) -> dict[str, Any]:
        """All that a later run needs."""
        return self.masters.state() | {"biases": self.biases, "steps": self.steps}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from `state`."""
        self.masters.load(state)
        with torch.no_grad():
            for name, bias in state["biases"].items():
                self.biases[name].copy_(bias)
        self.steps = state["steps"]


def save_compact(trainer: Trainer, out: Path, shards: int = 4) -> None:
    """BF16 masters and FP32 biases in files small enough to travel."""
    tensors = {name: master.bfloat16().cpu() for name, master in trainer.masters.masters.items()}
    tensors |= {name: bias.detach().cpu() for name, bias in trainer.biases.items()}
    names = sorted(tensors, key=lambda name: -tensors[name].nbytes)
    for shard in range(shards):
        save_file({name: tensors[name] for name in names[shard::shards]}, out / f"masters-{shard}.safetensors")
    (out / "masters.json").write_text(json.dumps({"steps": trainer.steps}))


def load_compact(trainer: Trainer, directory: Path) -> None:
    """The inverse of `save_compact`."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(directory.glob("masters-*.safetensors")):
        tensors |= load_file(file)
    biases = {name: tensors.pop(name) for name in list(tensors) if name in trainer.biases}
    steps = json.loads((directory / "masters.json").read_text())["steps"]
    trainer.load({"masters": tensors, "biases": biases, "steps": steps})


def load_checkpoint(trainer: Trainer, directory: Path) -> None:
    """Start from the stored values of a checkpoint, drafter included."""
    stored = dict(load_reference(Checkpoint(directory), trainer.model.classes.tolist()).named_parameters())
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            parameter.copy_(stored[name])
            if name in trainer.masters.masters:
                trainer.masters.masters[name].copy_(stored[name])


def train(trainer: Trainer, arguments: argparse.Namespace) -> None:
    """Steps until the time is over; prints and logs every hundredth."""
    first, last = arguments.start, arguments.to
    shares, mixtures = SCHEDULES[arguments.schedule]
    needed = variants(shares, first, last)
    lengths = {variant.tokens for variant in needed}
    streams = {
        tokens: loader(
            settings(arguments.data, arguments.tokenizer, trainer.config.vision, tokens, mixtures[tokens]),
            1000 * (trainer.steps + arguments.seed) + tokens,
            arguments.workers // len(lengths),
            trainer.device != "cpu",
        )
        for tokens in lengths
    }
    for variant in needed:
        trainer.prepare(next(streams[variant.tokens]), variant)
    rng = random.Random(trainer.steps)
    started, log = time.time(), (arguments.out / "log.jsonl").open("a")
    mark, marked = started, trainer.steps
    while (passed := (time.time() - started) / (60 * arguments.minutes)) < 1:
        progress = first + (last - first) * passed
        table = shares(progress)
        variant = rng.choices(list(table), list(table.values()))[0]
        report = trainer.run(next(streams[variant.tokens]), variant, progress)
        if trainer.steps % 100 == 0:
            values = [round(value, 4) for value in report.tolist()]
            now = time.time()
            rate = (trainer.steps - marked) * STEP_TOKENS / (now - mark)
            mark, marked = now, trainer.steps
            row = {"step": trainer.steps, "progress": round(progress, 4), "tokens_per_s": int(rate), "report": values}
            row |= {"tokens": variant.tokens, "sparse": variant.sparse}
            log.write(json.dumps(row) + "\n")
            log.flush()
            if trainer.steps % 200 == 0:
                print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--from", dest="start", type=float, default=0.0)
    parser.add_argument("--to", type=float, default=1.0)
    parser.add_argument("--state", type=Path, default=Path("train/runs/state.pt"))
    parser.add_argument("--resume", type=Path, help="directory of a compact copy")
    parser.add_argument("--checkpoint", type=Path, help="checkpoint whose stored values to start from")
    parser.add_argument("--schedule", choices=list(SCHEDULES), default="scratch")
    parser.add_argument("--seed", type=int, default=0, help="of the batches")
    parser.add_argument("--out", type=Path, default=Path("train/runs"))
    parser.add_argument("--data", type=Path, default=Path("train/data"))
    parser.add_argument("--tokenizer", type=Path, default=Path("checkpoints/mini"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--workers", type=int, default=15)
    parser.add_argument("--peak", type=float, default=2.5e-3)
    parser.add_argument("--eager", action="store_true", help="do not compile the fused operators")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    torch.backends.cuda.matmul.allow_tf32 = True
    accelerate.install(compiled=not arguments.eager)
    trainer = Trainer(arguments.tokenizer, arguments.device, arguments.peak)
    if arguments.state.exists():
        trainer.load(torch.load(arguments.state, map_location=arguments.device, weights_only=True))
    elif arguments.resume:
        load_compact(trainer, arguments.resume)
    elif arguments.checkpoint:
        load_checkpoint(trainer, arguments.checkpoint)
    train(trainer, arguments)
    arguments.state.parent.mkdir(parents=True, exist_ok=True)
    torch.save(trainer.state(), arguments.state)
    save_compact(trainer, arguments.out)
    print(f"{trainer.steps} steps", flush=True)


if __name__ == "__main__":
    main()
