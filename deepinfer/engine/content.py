"""What the tokens of a prompt are, beyond their ids: the content by which pages of KV are shared."""

from collections.abc import Hashable, Sequence

from deepinfer.core.plan import ImageSpan
from deepinfer.core.request import TEXT, Request
from deepinfer.text.images import START


def content_keys(request: Request) -> Sequence[Hashable]:
    """One key a prompt token: the id of a text token; (digest of its image, place in the span) of an image token."""
    if not request.images:
        return request.token_ids
    digests = iter([image.digest for image in request.images])
    keys: list[Hashable] = []
    digest, place = "", 0
    for token, kind in zip(request.token_ids, request.token_types, strict=True):
        if kind == TEXT:
            keys.append(token)
            continue
        if kind == START:
            digest, place = next(digests), 0
        keys.append((digest, place))
        place += 1
    return keys


def image_spans(request: Request) -> tuple[ImageSpan, ...]:
    """Where the images of a request stand in its prompt, in their order."""
    if not request.images:
        return ()
    starts = [position for position, kind in enumerate(request.token_types) if kind == START]
    return tuple(
        ImageSpan(start, start + image.grid.tokens, image.digest, len(image.patches), image.grid.rows * image.grid.cols)
        for start, image in zip(starts, request.images, strict=True)
    )
