"""What the tokens of a prompt are, beyond their ids: the content by which pages of KV are shared."""

from collections.abc import Hashable, Sequence
from hashlib import blake2b

from deepinfer.core.request import TEXT, Request
from deepinfer.text.images import ImageInput


def content_keys(request: Request) -> Sequence[Hashable]:
    """One key a prompt token: the id of a text token; (digest of its image, place in the span) of an image token."""
    if not request.images:
        return request.token_ids
    digests = iter([_digest(image) for image in request.images])
    keys: list[Hashable] = []
    digest, place = "", 0
    for token, kind in zip(request.token_ids, request.token_types, strict=True):
        if kind == TEXT:
            keys.append(token)
            continue
        if kind == 0:  # the start of the next span
            digest, place = next(digests), 0
        keys.append((digest, place))
        place += 1
    return keys


def _digest(image: ImageInput) -> str:
    grid = image.grid
    shape = f"{grid.vit_rows}x{grid.vit_cols}".encode()
    return blake2b(shape + image.patches.numpy().tobytes(), digest_size=16).hexdigest()
