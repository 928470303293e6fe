"""The reference model of a checkpoint, for questions that one forward pass over a whole sequence answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from deepinfer.checkpoint.reader import Checkpoint
from deepinfer.config.envs import read_environment
from deepinfer.engine.device import select_device
from deepinfer.engine.replay import ReplayPolicy
from deepinfer.reference.loading import load_reference
from deepinfer.speculative.rounds import Round, rounds_of
from deepinfer.text.engram_classes import engram_classes
from deepinfer.text.images import TEXT
from deepinfer.text.tokenizer import Tokenizer
from eval.questions import Question


@dataclass(frozen=True)
class Replay:
    """A reply made again by greedy speculative decoding: its rounds, and how far the reference model confirms it.

    tokens: of the reply. differing: those of them that are not the reference's greedy choice after what comes before;
    more than a few, which near ties can explain, would mean that the reply is not what these rounds make.
    """

    rounds: tuple[Round, ...]
    tokens: int
    differing: int


class Target:
    """Holds the reference model and runs it as the engine runs its own: same device, same replay."""

    def __init__(self, directory: Path) -> None:
        """Load the checkpoint in `directory`; CheckpointError or ConfigError as for `LLM`."""
        environment, checkpoint = read_environment(), Checkpoint(directory)
        self.config = checkpoint.config
        self.tokenizer = Tokenizer.from_file(directory)
        self.device = select_device(environment.accelerator)
        self._replay = ReplayPolicy.choose(environment, self.config)
        checkpoint.check()
        self.model = load_reference(checkpoint, engram_classes(self.tokenizer)).to(self.device)
        self._forbidden = torch.arange(self.config.vocab_size, device=self.device) >= self.tokenizer.vocab_size
        if self.config.image_token_id is not None:
            self._forbidden[self.config.image_token_id] = True

    @torch.inference_mode()
    def replay(self, question: Question, reply: Sequence[int]) -> Replay:
        """What one forward pass over the prompt of a question and a greedy reply to it tells."""
        length = len(question.prompt)
        ids = torch.tensor((*question.prompt, *reply), device=self.device)
        types = torch.full_like(ids, TEXT, dtype=torch.int8)
        types[:length] = torch.tensor(question.types, dtype=torch.int8)
        start = None
        if self._replay.mode != "off":
            start = torch.tensor([self._replay.start(length)], device=self.device)
        compact = self._replay.mode == "compact"
        output = self.model(ids[None], types[None], question.images, start, compact)
        logits = output.logits[0, length - 1 - output.first : -1].masked_fill(self._forbidden, -torch.inf)
        differing = int((logits.argmax(-1) != ids[length:]).sum())
        rounds = rounds_of(self.model, ids, output, length) if self.config.draft_stages else []
        return Replay(tuple(rounds), len(reply), differing)
