"""The model of a checkpoint, for questions that one forward pass over a whole sequence answers."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from deepinfer.checkpoint.reader import Checkpoint
from deepinfer.config.envs import read_environment
from deepinfer.engine.device import select_device
from deepinfer.engine.replay import ReplayPolicy
from deepinfer.reference.loading import load_reference
from deepinfer.reference.model import ForwardOutput
from deepinfer.speculative.rounds import Round, rounds_of
from deepinfer.text.chat import ChatFormat
from deepinfer.text.engram_classes import engram_classes
from deepinfer.text.images import TEXT
from deepinfer.text.tokenizer import Tokenizer
from eval.questions import Question


class Target:
    """Holds the reference model and runs it as the engine does: same device, same replay, same forbidden tokens."""

    def __init__(self, directory: Path) -> None:
        """Load the checkpoint in `directory`; CheckpointError or ConfigError as for `LLM`."""
        environment, checkpoint = read_environment(), Checkpoint(directory)
        self.config = checkpoint.config
        self.tokenizer = Tokenizer.from_file(directory)
        self._chat = ChatFormat(self.tokenizer)
        self.device = select_device(environment.accelerator)
        self._replay = ReplayPolicy.choose(environment, self.config)
        checkpoint.check()
        self.model = load_reference(checkpoint, engram_classes(self.tokenizer)).to(self.device)
        allowed = torch.arange(self.config.vocab_size, device=self.device) < self.tokenizer.vocab_size
        if self.config.image_token_id is not None:
            allowed[self.config.image_token_id] = False
        self._forbidden = ~allowed

    @torch.inference_mode()
    def run(self, question: Question, reply: Sequence[int]) -> tuple[Tensor, ForwardOutput]:
        """One pass over a prompt and a reply: the ids, int64 [T], and the output, as the engine's steps would give."""
        ids = torch.tensor((*question.prompt, *reply), device=self.device)
        types = torch.full_like(ids, TEXT, dtype=torch.int8)
        types[: len(question.types)] = torch.tensor(question.types, dtype=torch.int8)
        start = None
        if self._replay.mode != "off":
            start = torch.tensor([self._replay.start(len(question.prompt))], device=self.device)
        compact = self._replay.mode == "compact"
        return ids, self.model(ids[None], types[None], question.images, start, compact)

    def choices(self, output: ForwardOutput, prompt_length: int) -> list[int]:
        """The greedy choice for each token of a reply, and the one after it, from the output of `run`."""
        logits = output.logits[0, prompt_length - 1 - output.first :]
        chosen: list[int] = logits.masked_fill(self._forbidden, -torch.inf).argmax(-1).tolist()
        return chosen

    def content(self, question: Question, reply: Sequence[int]) -> str:
        """The text of a reply's ids without its reasoning, as `LLM.chat` gives it."""
        shown = reply[:-1] if reply[-1] == self.config.eos_token_id else reply
        form = self._chat.encode(question.sample.messages, thinking=question.sample.thinking).reply
        return self._chat.parse(shown, form).content or ""

    def rounds(self, question: Question, reply: Sequence[int]) -> list[Round]:
        """The rounds in which greedy speculative decoding would make a greedily decoded reply."""
        ids, output = self.run(question, reply)
        return rounds_of(self.model, ids, output, len(question.prompt))
