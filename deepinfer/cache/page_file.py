"""One page as a file's bytes: a header that says what it is, then the page.

Little-endian: magic (8 bytes), format version (uint32), digest of the model identity (32), digest of the page (32),
length of the page's bytes (uint64), checksum over all of that and the page (BLAKE2b, 32), the page.
"""

import struct
from hashlib import blake2b

from deepinfer.cache.content import DIGEST_BYTES

MAGIC = b"deepkvpg"
VERSION = 1
_FIELDS = struct.Struct(f"<8sI{DIGEST_BYTES}s{DIGEST_BYTES}sQ")
HEADER_BYTES = _FIELDS.size + DIGEST_BYTES


class UnusableFileError(Exception):
    """The bytes are not the page that was asked for; the message says why."""


def encode(identity: bytes, digest: bytes, page: bytes) -> bytes:
    """The file that holds `page`, whose content has `digest`, of the model with `identity` (digests of 32 bytes)."""
    fields = _FIELDS.pack(MAGIC, VERSION, identity, digest, len(page))
    return fields + _checksum(fields, page) + page


def decode(identity: bytes, digest: bytes, file: bytes) -> bytes:
    """The page in a file. Raises UnusableFileError unless it is whole and just the page that is asked for."""
    if len(file) < HEADER_BYTES or not file.startswith(MAGIC):
        raise UnusableFileError("it is no page file, or only the start of one")
    fields, checksum, page = file[: _FIELDS.size], file[_FIELDS.size : HEADER_BYTES], file[HEADER_BYTES:]
    _, version, of_model, of_page, length = _FIELDS.unpack(fields)
    if version != VERSION:
        raise UnusableFileError(f"its format version is {version}; this engine reads {VERSION}")
    if of_model != identity:
        raise UnusableFileError("it belongs to another model or to another cache layout")
    if of_page != digest:
        raise UnusableFileError("it holds another page than its name says")
    if len(page) != length:
        raise UnusableFileError(f"it holds {len(page)} of {length} bytes: it was cut or written to")
    if checksum != _checksum(fields, page):
        raise UnusableFileError("its checksum does not fit: it is corrupt")
    return page


def _checksum(fields: bytes, page: bytes) -> bytes:
    return blake2b(fields + page, digest_size=DIGEST_BYTES).digest()
