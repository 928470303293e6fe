"""From what a caller passes to checked requests: what can be wrong with one is found here, before any runs."""

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from deepinfer.config.model import ModelConfig
from deepinfer.core.errors import RequestError
from deepinfer.core.request import TEXT, Request
from deepinfer.core.sampling_params import SamplingParams
from deepinfer.sampling.grammar.request import GrammarDesk, RequestGrammar
from deepinfer.text.chat import ChatFormat
from deepinfer.text.images import ImageInput, expand_images
from deepinfer.text.loading import ImageLoader
from deepinfer.text.reply import ReplyFormat
from deepinfer.text.sources import ImageLike
from deepinfer.text.spellings import IMAGE
from deepinfer.text.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]
Conversation = Sequence[Mapping[str, Any]]
Pending = Callable[[], Request]
"""A request whose images are being read; the call waits for them, and raises `RequestError` if one will not do."""

_WITH_IMAGES = f'{{"prompt": text or token ids, "images": [...]}}, with {IMAGE} (or its id) for each image'


class Admission:
    """Makes requests for one model; every method raises `RequestError` for a request that cannot be served.

    Requests come in two goes, so that the images of all of a call are read at the same time.
    """

    def __init__(
        self,
        config: ModelConfig,
        tokenizer: Tokenizer,
        chat_format: ChatFormat,
        grammars: GrammarDesk,
        images: ImageLoader,
        capacity: int,
    ) -> None:
        """`capacity`: tokens that the caches hold, all requests together."""
        self._grammars = grammars
        self._capacity = capacity
        self._config = config
        self._tokenizer = tokenizer
        self._chat_format = chat_format
        self._images = images

    def prompt(self, index: int, prompt: Prompt, params: SamplingParams) -> Pending:
        """Admit text (the beginning-of-sequence token is put before it) or token ids (taken as they are).

        A prompt with images is `{"prompt": text or token ids, "images": [...]}`; in it, and only there, the image
        token's spelling or id stands for an image.
        """
        if isinstance(prompt, Mapping):
            return self._prompt_with_images(index, prompt, params)
        if isinstance(prompt, str):
            ids = [self._config.bos_token_id, *self._tokenizer.encode(_checked_text(prompt))]
        else:
            ids = self._checked_ids(prompt, may_show_images=False)
        text = prompt if isinstance(prompt, str) else None
        grammar = self._grammars.plain(params)
        return lambda: self._request(index, text, ids, params, grammar=grammar)

    def chat(
        self,
        index: int,
        messages: Conversation,
        params: SamplingParams,
        options: Mapping[str, Any],
        *,
        tool_grammar: bool = True,
    ) -> Pending:
        """Admit a conversation, images included; `options` are keywords of `ChatFormat.encode`.

        tool_grammar: hold calls of declared tools to their form and schemas.
        """
        encoded = self._chat_format.encode(messages, **options)
        started = self._start_images(encoded.ids, encoded.images)
        tools = options.get("tools") if tool_grammar else None
        grammar = self._grammars.reply(params, encoded.reply, tools)

        def finish() -> Request:
            ids, types, images = self._expanded(encoded.ids, started())
            return self._request(index, None, ids, params, types, images, encoded.reply, grammar)

        return finish

    def _prompt_with_images(self, index: int, prompt: Mapping[str, Any], params: SamplingParams) -> Pending:
        text, images = prompt.get("prompt"), prompt.get("images", ())
        if unknown := [key for key in prompt if key not in ("prompt", "images")]:
            raise RequestError(f"a prompt has the unknown key {unknown[0]!r}; it takes {_WITH_IMAGES}")
        if not isinstance(images, Sequence) or isinstance(images, str | bytes):
            raise RequestError(f"images takes a list, not {type(images).__name__}; a prompt takes {_WITH_IMAGES}")
        if isinstance(text, str):
            ids = self._ids_between_images(_checked_text(text))
        else:
            ids = self._checked_ids(text, may_show_images=True)
        started, grammar = self._start_images(ids, images), self._grammars.plain(params)

        def finish() -> Request:
            expanded, types, shown = self._expanded(ids, started())
            return self._request(
                index, text if isinstance(text, str) else None, expanded, params, types, shown, grammar=grammar
            )

        return finish

    def _check_tokens(self, name: str, ids: Iterable[int]) -> None:
        for token in ids:
            if token >= self._tokenizer.vocab_size:
                last = self._tokenizer.vocab_size - 1
                raise RequestError(f"SamplingParams: {name} names token {token}; the vocabulary has 0 to {last}")

    def _ids_between_images(self, text: str) -> list[int]:
        marker = self._config.image_token_id
        if marker is None:
            return [self._config.bos_token_id, *self._tokenizer.encode(text)]
        ids = [self._config.bos_token_id]
        for place, piece in enumerate(text.split(IMAGE)):
            ids += ([marker] if place else []) + (self._tokenizer.encode(piece) if piece else [])
        return ids

    def _start_images(self, ids: Sequence[int], sources: Sequence[ImageLike]) -> Callable[[], list[ImageInput]]:
        """Begin to read images, for each of which the ids have one marker; the function waits for them."""
        places = sum(token == self._config.image_token_id for token in ids)
        if places != len(sources):
            raise RequestError(f"the prompt has places for {places} images, but {len(sources)} are given")
        return self._images.start(sources)

    def _expanded(
        self, ids: Sequence[int], images: Sequence[ImageInput]
    ) -> tuple[list[int], list[int], Sequence[ImageInput]]:
        """Ids with the images' spans in them, their types, and the images."""
        return *expand_images(ids, [image.grid for image in images], self._config.image_token_id), images

    def _checked_ids(self, prompt: object, may_show_images: bool) -> list[int]:
        if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
            raise RequestError(
                f"a prompt is text, a list of token ids, or with images {_WITH_IMAGES}; not {type(prompt).__name__}"
            )
        if not prompt:
            raise RequestError("the prompt is empty; it takes at least one token id")
        for place, token in enumerate(prompt):
            if not isinstance(token, int) or isinstance(token, bool):
                raise RequestError(f"token {place} is {token!r}; a prompt is text or a list of whole numbers")
            if not 0 <= token < self._tokenizer.vocab_size:
                raise RequestError(
                    f"token {place} is {token}; the vocabulary has 0 to {self._tokenizer.vocab_size - 1}"
                )
            if token == self._config.image_token_id and not may_show_images:
                raise RequestError(
                    f"token {place} is {token}, the place of an image; a prompt with images is {_WITH_IMAGES}"
                )
        return list(prompt)

    def _request(
        self,
        index: int,
        prompt: str | None,
        ids: Sequence[int],
        params: SamplingParams,
        types: Sequence[int] | None = None,
        images: Sequence[ImageInput] = (),
        reply: ReplyFormat | None = None,
        grammar: RequestGrammar | None = None,
    ) -> Request:
        context = self._config.max_position_embeddings
        if len(ids) >= context:
            raise RequestError(
                f"the prompt has {len(ids)} tokens; the context of {context} must hold it and at least one new token"
            )
        if len(ids) > self._capacity:
            raise RequestError(
                f"the prompt has {len(ids)} tokens; the caches hold {self._capacity}; set cache_bytes higher"
            )
        self._check_tokens("logit_bias", params.logit_bias or ())
        self._check_tokens("stop_token_ids", params.stop_token_ids)
        seed = secrets.randbits(64) if params.seq_seed is None else params.seq_seed
        types = [TEXT] * len(ids) if types is None else types
        return Request(
            index, prompt, tuple(ids), tuple(types), tuple(images), params, seed, reply=reply, grammar=grammar
        )


def _checked_text(prompt: str) -> str:
    if not prompt:
        raise RequestError("the prompt is empty; it takes at least one character")
    return prompt
