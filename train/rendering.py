"""Samples to token ids, with the weight that each token has as a training target."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepinfer.config.model import VisionConfig
from deepinfer.text.chat import ChatFormat
from deepinfer.text.images import TEXT, ImageInput, expand_images, preprocess
from deepinfer.text.spellings import ASSISTANT, END_THINK, EOS, IMAGE
from deepinfer.text.tokenizer import Tokenizer
from train.sample import Sample
from train.tokenised import control_id


@dataclass(frozen=True)
class Rendered:
    """A whole sequence from BOS to EOS.

    ids int32 [n]; target_weight float32 [n], the weight of a token as the thing to be predicted; types int8 [n], -1
    for text, else the kind of image token; images in the order of their spans.
    """

    ids: NDArray[np.int32]
    target_weight: NDArray[np.float32]
    types: NDArray[np.int8]
    images: tuple[ImageInput, ...] = ()


class Renderer:
    """Renders samples with the same encoder that serves prompts, so that training sees what inference sees."""

    def __init__(self, tokenizer: Tokenizer, vision: VisionConfig | None, prompt_weight: float = 0.1) -> None:
        """`prompt_weight` is the weight of text tokens that are not the assistant's; the assistant's have 1."""
        self._tokenizer = tokenizer
        self._chat = ChatFormat(tokenizer)
        self._vision = vision
        self._prompt_weight = prompt_weight
        self._assistant, self._end_think, self._eos, self._image = (
            control_id(tokenizer, spelling) for spelling in (ASSISTANT, END_THINK, EOS, IMAGE)
        )

    def render(self, sample: Sample) -> Rendered:
        """Prompt, then reasoning and `</think>` if thinking is on, then the answer and EOS."""
        prompt = self._chat.encode(sample.messages, thinking=sample.thinking)
        reply = self._reply(sample)
        inputs = tuple(self._preprocess(image) for image in sample.images)
        ids, types = expand_images([*prompt.ids, *reply], [image.grid for image in inputs], self._image)
        weight = self._weights(ids, len(ids) - len(reply))
        kinds = np.array(types, np.int8)
        weight[kinds != TEXT] = 0
        return Rendered(np.array(ids, np.int32), weight, kinds, inputs)

    def _reply(self, sample: Sample) -> list[int]:
        reasoning = [*self._tokenizer.encode(sample.reasoning), self._end_think] if sample.thinking else []
        return [*reasoning, *self._tokenizer.encode(sample.answer), self._eos]

    def _preprocess(self, image: object) -> ImageInput:
        if self._vision is None:
            raise ValueError("a sample with images needs a model with a vision tower")
        return preprocess(image, self._vision)  # type: ignore[arg-type]

    def _weights(self, ids: Sequence[int], prompt: int) -> NDArray[np.float32]:
        """1 for the reply and for earlier turns of the assistant up to EOS, `prompt_weight` otherwise, 0 for BOS.

        An earlier turn begins two ids after `<｜Assistant｜>`: the id between opens or closes its reasoning.
        """
        weight = np.full(len(ids), self._prompt_weight, np.float32)
        weight[0] = 0
        weight[prompt:] = 1
        found = np.array(ids[:prompt])
        ends = np.flatnonzero(found == self._eos)
        for start, end in zip(np.flatnonzero(found == self._assistant), ends, strict=False):
            weight[start + 2 : end + 1] = 1
        return weight
