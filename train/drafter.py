"""Trains the DSpark stages on the frozen target and writes the finished checkpoint.

    python -m train.drafter --minutes 3 --state /tmp/state.pt --out OUT
    python -m train.drafter --minutes 3 --checkpoint checkpoints/mini --out OUT

The target comes from a state file of `train.target` or from a checkpoint; the drafter's weights from the checkpoint, if
one is given, else they start anew. The time begins when everything is compiled.

The target runs as it will serve (stored weights, selected positions). Blocks start at random places of replies; tokens
inside a block are given (teacher forcing) and every row is trained towards the target's own distribution.
"""

import argparse
import json
import math
import random
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from deepinfer.checkpoint.layout import Storage
from deepinfer.checkpoint.writer import write_checkpoint
from deepinfer.reference.draft import draft_context, draft_hidden
from deepinfer.reference.loading import state as stored_state
from train import accelerate
from train.loop import CapturedStep, Inputs, Outputs, learning_rate
from train.masters import Masters, balance
from train.operators import STATE
from train.stream import REPLIES, loader, settings
from train.target import Trainer, forward, load_checkpoint

ANCHORS = 128  # of each row of a batch


def choose_anchors(weight: Tensor, block: int, count: int) -> tuple[Tensor, Tensor]:
    """Random places of replies: weights [B, T] -> positions int64 [B, count] and validity bool [B, count, block].

    The token after an anchor is a trained target (weight 1); a row of the block is valid while its targets are.
    """
    trained = weight == 1
    room = trained.clone()
    room[:, -block:] = False
    keys = torch.rand(weight.shape, device=weight.device) + room.float()
    found = keys.topk(count, dim=-1).indices
    ahead = found[..., None] + torch.arange(block, device=weight.device)
    rows = torch.arange(len(weight), device=weight.device)[:, None, None]
    valid = trained[rows, ahead.clamp(max=weight.shape[1] - 1)] & room.gather(1, found)[..., None]
    return found, valid.int().cumprod(-1).bool()


def gather_rows(x: Tensor, at: Tensor) -> Tensor:
    """Rows of x [B, T, C] at positions [B, ...] -> [B * ..., C], with a fast gradient."""
    offsets = torch.arange(len(x), device=x.device).view(-1, *[1] * (at.dim() - 1)) * x.shape[1]
    return nn.functional.embedding((at + offsets).flatten(), x.reshape(-1, x.shape[-1]))


def draft_losses(
    draft: Tensor, teacher: Tensor, confidence: Tensor, labels: Tensor, valid: Tensor
) -> dict[str, Tensor]:
    """The three losses and what is accepted: logits [N, G, vocab] twice, [N, G] otherwise.

    0.1 cross-entropy, 0.9 L1 distance to the target's distribution and 1.0 binary cross-entropy of the confidence
    against the chance of acceptance, rows weighted by exp(-k / G).
    """
    block = draft.shape[1]
    weight = valid * torch.exp(-torch.arange(block, device=draft.device) / block)
    total = weight.sum().clamp(min=1)
    cross = nn.functional.cross_entropy(draft.flatten(0, 1), labels.flatten(), reduction="none").view_as(weight)
    distance = (draft.softmax(-1) - teacher.softmax(-1)).abs().sum(-1)
    accepted = (1 - 0.5 * distance).clamp(0, 1).detach()
    sure = nn.functional.binary_cross_entropy_with_logits(confidence, accepted, reduction="none")
    right = ((draft.argmax(-1) == teacher.argmax(-1)) & valid).int().cumprod(-1).sum(-1)
    whole = valid.all(-1)
    return {
        "loss": ((0.1 * cross + 0.9 * distance + sure) * weight).sum() / total,
        "distance": (distance * weight).sum() / total,
        "confidence": (sure * weight).sum() / total,
        "length": 1 + (right * whole).sum() / whole.sum().clamp(min=1),
    }


class DraftTrainer:
    """Owns the drafter's masters; the target is frozen."""

    def __init__(self, target: Trainer, peak: float) -> None:
        self.target, self.model, self.config = target, target.model, target.config
        named = dict(self.model.named_parameters())
        trained = {n: p for n, p in named.items() if n.startswith("mtp.") and "gate.bias" not in n}
        for name, parameter in named.items():
            parameter.requires_grad_(name in trained)
        self.masters = Masters(trained, target.storage, target.device, weight_decay=0.0)
        self.bias_rate = torch.zeros((), device=target.device)
        self.peak, self.steps = peak, 0
        self.captured: CapturedStep | None = None

    def blocks(self, batch: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Draft and teacher logits, confidence logits, labels and validity of all blocks of a batch."""
        config, block, ids = self.config, self.config.dspark_block_size, batch["ids"].long()
        with torch.no_grad():
            STATE.begin(sparse=True)
            out = forward(self.model, batch, self.target.canvas)
            at, valid = choose_anchors(batch["loss_weight"], block, ANCHORS)
            inside = at[..., None] + torch.arange(block, device=ids.device)
            inside = inside.clamp(max=ids.shape[1] - 2)
            teacher = self.model.logits(gather_rows(out.hidden, inside)).view(-1, block, config.vocab_size)
            given = ids.gather(1, inside.flatten(1)).view(-1, block)
            labels = ids.gather(1, (inside + 1).flatten(1)).view(-1, block)
            before = at[..., None] - torch.arange(config.sliding_window, 0, -1, device=ids.device)
        STATE.begin(sparse=True)
        stages = list(self.model.mtp)
        contexts = draft_context(stages, out.features, torch.arange(ids.shape[1], device=ids.device))
        shape = (at.numel(), config.sliding_window, config.head_dim)
        windows = [gather_rows(keys, before.clamp(min=0)).view(shape) for keys in contexts]
        inputs = torch.full_like(given, config.dspark_noise_token_id)
        inputs[:, 0] = given[:, 0]
        positions = at.view(-1, 1) + torch.arange(block, device=ids.device)
        mask = (before >= 0).view(at.numel(), -1)
        x = draft_hidden(stages, self.model.embed(inputs), windows, mask, positions, config.hc_mult)
        last = stages[-1]
        draft = self.model.logits(last.norm(x)) + last.markov_head(given)
        confidence = last.confidence_head(x.detach(), last.markov_head.embed(given).detach())
        return draft, teacher, confidence, labels, valid.view(-1, block)

    def step(self, batch: Inputs) -> Outputs:
        """Forward, losses, backward, update."""
        found = draft_losses(*self.blocks(batch))
        found["loss"].backward()
        norm = self.masters.step(clip=1.0)
        balance(STATE.loads, self.bias_rate)
        return {"report": torch.stack([found[name].detach() for name in ("distance", "confidence", "length")] + [norm])}

    def prepare(self, batch: Inputs) -> None:
        """Compile and capture the step; the few updates that this takes change no weight."""
        self.masters.lr.fill_(0.0)
        self.bias_rate.fill_(0.0)
        self.captured = CapturedStep(self.step, batch, None, self.target.device)

    def run(self, batch: Inputs, progress: float) -> Tensor:
        """One step; returns L1 distance, confidence loss, mean accepted length (with bonus, whole blocks), norm."""
        if self.captured is None:
            self.prepare(batch)
        self.masters.lr.fill_(learning_rate(progress, self.steps, self.peak))
        self.bias_rate.fill_(3e-3 * (1 - progress))
        self.steps += 1
        return self.captured(batch)["report"]


def write(target: Trainer, directory: Path, tokenizer: Path) -> None:
    """The whole model as a checkpoint in the released layout."""
    tensors = {name: tensor.float().cpu() for name, tensor in stored_state(target.model).items()}
    files = [tokenizer / "tokenizer.json", tokenizer / "tokenizer_config.json"]
    write_checkpoint(directory, target.config_json, tensors, 15_900_000, files, Storage.BF16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--state", type=Path, help="of the trained target")
    parser.add_argument("--checkpoint", type=Path, help="checkpoint whose stored values to start from")
    parser.add_argument("--out", type=Path, default=Path("train/runs/checkpoint"), help="directory to write")
    parser.add_argument("--data", type=Path, default=Path("train/data"))
    parser.add_argument("--tokenizer", type=Path, default=Path("checkpoints/mini"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--workers", type=int, default=15)
    parser.add_argument("--peak", type=float, default=2e-3)
    parser.add_argument("--eager", action="store_true", help="do not compile the fused operators")
    arguments = parser.parse_args()
    if not (arguments.state or arguments.checkpoint):
        parser.error("the target comes from --state, or from --checkpoint: give one of them")
    torch.backends.cuda.matmul.allow_tf32 = True
    accelerate.install(compiled=not arguments.eager)
    target = Trainer(arguments.tokenizer, arguments.device, peak=0.0)
    if arguments.checkpoint:
        load_checkpoint(target, arguments.checkpoint)
    if arguments.state:
        target.load(torch.load(arguments.state, map_location=arguments.device, weights_only=True))
    drafter = DraftTrainer(target, arguments.peak)
    vision = target.config.vision
    assert vision is not None
    pack = settings(arguments.data, arguments.tokenizer, vision, 1024, REPLIES)
    batches = loader(pack, random.randrange(2**31), arguments.workers, arguments.device != "cpu")
    drafter.prepare(next(batches))
    started = time.time()
    while (passed := (time.time() - started) / (60 * arguments.minutes)) < 1:
        report = drafter.run(next(batches), passed)
        if drafter.steps % 200 == 0 or drafter.steps == 1:
            values = [round(value, 4) for value in report.tolist()]
            assert all(math.isfinite(value) for value in values), values
            print(json.dumps({"step": drafter.steps, "progress": round(passed, 3), "report": values}), flush=True)
    write(target, arguments.out, arguments.tokenizer)
    print(f"{drafter.steps} steps; wrote {arguments.out}", flush=True)


if __name__ == "__main__":
    main()
