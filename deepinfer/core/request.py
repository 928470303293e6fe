"""One request, checked and ready for the engine."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from deepinfer.core.sampling_params import SamplingParams

if TYPE_CHECKING:  # the noun only carries these; what they hold is the affair of other rooms
    from deepinfer.sampling.grammar.request import RequestGrammar
    from deepinfer.text.images import ImageInput
    from deepinfer.text.reply import ReplyFormat

TEXT = -1


@dataclass(frozen=True)
class Request:
    """Host data of one request; nothing changes it after admission.

    index: place in the caller's list, by which the output is returned.
    prompt: the text it came from; None for token ids and chats.
    token_ids: the prompt as the model reads it.
    token_types: one entry a token: -1 text, 0 image start, 1 image, 2 newline, 3 image end.
    images: preprocessed images, in the order of their spans.
    seed: seed of the sampling draws, already settled.
    reply: how a chat's reply is to be parsed; None for a plain prompt.
    priority: lower is served sooner; waiting makes up for a higher number.
    completion: which of the completions of its prompt it makes, from 0.
    grammar: what the reply is held to; None: nothing.
    """

    index: int
    prompt: str | None
    token_ids: tuple[int, ...]
    token_types: tuple[int, ...]
    images: tuple["ImageInput", ...]
    params: SamplingParams
    seed: int
    reply: "ReplyFormat | None" = None
    priority: int = 0
    completion: int = 0
    grammar: "RequestGrammar | None" = None
