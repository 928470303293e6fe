"""From what a caller passes to checked requests: what can be wrong with one is found here, before any runs."""

import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from deepinfer.config.model import ModelConfig
from deepinfer.core.errors import RequestError
from deepinfer.core.request import TEXT, Request
from deepinfer.core.sampling_params import SamplingParams
from deepinfer.sampling.grammar.request import GrammarDesk, RequestGrammar
from deepinfer.text.chat import ChatFormat
from deepinfer.text.images import ImageInput, expand_images, load_image, preprocess
from deepinfer.text.reply import ReplyFormat
from deepinfer.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]
Conversation = Sequence[Mapping[str, Any]]


class Admission:
    """Makes requests for one model; every method raises `RequestError` for a request that cannot be served."""

    def __init__(
        self, config: ModelConfig, tokenizer: Tokenizer, chat_format: ChatFormat, grammars: GrammarDesk, capacity: int
    ) -> None:
        """`capacity`: tokens that the caches hold, all requests together."""
        self._grammars = grammars
        self._capacity = capacity
        self._config = config
        self._tokenizer = tokenizer
        self._chat_format = chat_format

    def prompt(self, index: int, prompt: Prompt, params: SamplingParams) -> Request:
        """Admit text (the beginning-of-sequence token is put before it) or token ids (taken as they are)."""
        if isinstance(prompt, str):
            if not prompt:
                raise RequestError("the prompt is empty; it takes at least one character")
            ids = [self._config.bos_token_id, *self._tokenizer.encode(prompt)]
            return self._request(index, prompt, ids, params, grammar=self._grammars.plain(params))
        ids = self._checked_ids(prompt)
        return self._request(index, None, ids, params, grammar=self._grammars.plain(params))

    def chat(
        self,
        index: int,
        messages: Conversation,
        params: SamplingParams,
        options: Mapping[str, Any],
        *,
        tool_grammar: bool = True,
    ) -> Request:
        """Admit a conversation, images included; `options` are keywords of `ChatFormat.encode`.

        tool_grammar: hold calls of declared tools to their form and schemas.
        """
        encoded = self._chat_format.encode(messages, **options)
        images = [self._image(source, number) for number, source in enumerate(encoded.images)]
        ids, types = expand_images(encoded.ids, [image.grid for image in images], self._config.image_token_id)
        tools = options.get("tools") if tool_grammar else None
        grammar = self._grammars.reply(params, encoded.reply, tools)
        return self._request(index, None, ids, params, types, images, encoded.reply, grammar)

    def _image(self, source: Any, number: int) -> ImageInput:
        if self._config.vision is None:
            raise RequestError("this checkpoint has no vision tower; send text only")
        try:
            return preprocess(load_image(source), self._config.vision)
        except RequestError as error:
            raise RequestError(f"image {number}: {error}") from error

    def _check_tokens(self, name: str, ids: Iterable[int]) -> None:
        for token in ids:
            if token >= self._tokenizer.vocab_size:
                last = self._tokenizer.vocab_size - 1
                raise RequestError(f"SamplingParams: {name} names token {token}; the vocabulary has 0 to {last}")

    def _checked_ids(self, prompt: object) -> list[int]:
        if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
            raise RequestError(f"a prompt is text or a list of token ids, not {type(prompt).__name__}")
        if not prompt:
            raise RequestError("the prompt is empty; it takes at least one token id")
        for place, token in enumerate(prompt):
            if not isinstance(token, int) or isinstance(token, bool):
                raise RequestError(f"token {place} is {token!r}; a prompt is text or a list of whole numbers")
            if not 0 <= token < self._tokenizer.vocab_size:
                raise RequestError(
                    f"token {place} is {token}; the vocabulary has 0 to {self._tokenizer.vocab_size - 1}"
                )
            if token == self._config.image_token_id:
                raise RequestError(f"token {place} is {token}, the place of an image; images are given through chat")
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
