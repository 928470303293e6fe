"""A loaded model and the way of its requests: admission, generation, replies."""

from collections.abc import Callable, Sequence
from pathlib import Path

from deepinfer.checkpoint.reader import Checkpoint
from deepinfer.config.envs import Environment
from deepinfer.config.model import ModelConfig
from deepinfer.core.errors import CheckpointError
from deepinfer.core.outputs import RequestOutput
from deepinfer.core.request import Request
from deepinfer.engine import loop
from deepinfer.engine.admission import Admission
from deepinfer.engine.batch import BatchLimits
from deepinfer.engine.device import select_device
from deepinfer.engine.replay import ReplayPolicy
from deepinfer.engine.replies import request_output
from deepinfer.engine.runner import ReferenceRunner
from deepinfer.engine.sequence import Sequence as Running
from deepinfer.reference.loading import load_reference
from deepinfer.text.chat import ChatFormat
from deepinfer.text.engram_classes import check_engram_classes, engram_classes
from deepinfer.text.tokenizer import Tokenizer


class Engine:
    """Owns the weights of one checkpoint; the only object that runs them."""

    def __init__(self, directory: Path, environment: Environment, limits: BatchLimits) -> None:
        """Load the checkpoint in `directory`; CheckpointError or ConfigError if it or the environment will not do."""
        checkpoint = Checkpoint(directory)
        self.config = checkpoint.config
        self._device = select_device(environment.accelerator)
        self._replay = ReplayPolicy.choose(environment, self.config)
        self._limits = limits.alone() if environment.batch_invariant else limits
        self.tokenizer = Tokenizer.from_file(directory)
        classes = _checked_classes(self.tokenizer, self.config, str(directory))
        checkpoint.check()
        model = load_reference(checkpoint, classes).to(self._device)
        self._runner = ReferenceRunner(model, self._replay.mode, self.tokenizer.vocab_size)
        self._chat_format = ChatFormat(self.tokenizer)
        self.admission = Admission(self.config, self.tokenizer, self._chat_format)

    def run(self, requests: Sequence[Request], on_step: Callable[[list[Running]], None]) -> list[RequestOutput]:
        """Answer `requests`, in their order; `on_step` gets the sequences that a step extended."""
        sequences = [self._start(request) for request in requests]
        loop.run_to_end(sequences, self._runner, self.config.pad_token_id, self._device, self._limits, on_step)
        return [request_output(sequence, self.tokenizer, self._chat_format) for sequence in sequences]

    def _start(self, request: Request) -> Running:
        params, length = request.params, len(request.token_ids)
        stops = set(params.stop_token_ids)
        if not params.ignore_eos:
            stops.add(self.config.eos_token_id)
        room = self.config.max_position_embeddings - length
        most = room if params.max_tokens is None else min(room, params.max_tokens)
        return Running(request, self._replay.start(length), stops, most)


def _checked_classes(tokenizer: Tokenizer, config: ModelConfig, where: str) -> list[int]:
    """Return the Engram class of every token id, once the tokenizer is known to be this checkpoint's."""
    if tokenizer.vocab_size > config.vocab_size:
        raise CheckpointError(
            f"{where}: the tokenizer has {tokenizer.vocab_size} tokens but vocab_size is {config.vocab_size}; "
            "use the tokenizer.json the checkpoint was trained with"
        )
    classes = engram_classes(tokenizer)
    if config.engram_layer_ids:
        check_engram_classes(classes, config, where)
    return classes
