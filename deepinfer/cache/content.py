"""What a page holds, as a digest: of its tokens, all tokens before it, and the model that made it.

A token's key is its id; of an image token, (hash of the image's content, number of the token in its span). The digest
of a page covers that of the page before it, so equal digests mean equal prefixes, in this process and in any other.
"""

from array import array
from collections.abc import Hashable, Sequence
from hashlib import blake2b

DIGEST_BYTES = 32


def root_digest(identity: str) -> bytes:
    """Digest that the first pages of every request follow; `identity` names model, formats and page size."""
    return blake2b(identity.encode(), digest_size=DIGEST_BYTES).digest()


def page_digest(before: bytes, keys: Sequence[Hashable]) -> bytes:
    """Digest of a page of tokens with content `keys` that follows the page with digest `before`."""
    return blake2b(before + _encoded(keys), digest_size=DIGEST_BYTES).digest()


def _encoded(keys: Sequence[Hashable]) -> bytes:
    """Distinct bytes for distinct keys; the common case, text alone, is the fast one."""
    ids = [key for key in keys if type(key) is int]
    if len(ids) == len(keys):
        return b"ids" + array("q", ids).tobytes()
    return b"mix" + repr(tuple(keys)).encode()
