"""Pages on disk: they survive a restart, and nothing is believed that does not prove itself."""

import os
import tempfile
import warnings
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path

from deepinfer.cache.content import DIGEST_BYTES, root_digest
from deepinfer.cache.page_file import UnusableFileError, decode, encode
from deepinfer.cache.tiers import Entry
from deepinfer.core.errors import ConfigError

_SUFFIX, _UNFINISHED = ".page", ".tmp"


class DiskTier:
    """A file a page, up to `budget` bytes, in a folder of `directory` for each model identity.

    Files appear whole (written aside, then renamed) and are checked when they are read. One that is torn, corrupt or
    foreign is skipped with a warning and replaced when its page is stored again. Processes of the same model may share
    the directory; each keeps the budget for the files that it knows of.
    """

    name = "disk"

    def __init__(self, directory: str | Path, identity: str, budget: int) -> None:
        """Take stock of what an earlier process left. Raises ConfigError for a directory that cannot be used."""
        self._identity = root_digest(identity)
        self._folder = Path(directory) / self._identity.hex()[:16]
        self._room = budget
        self._sizes: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._bad: set[bytes] = set()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._take_stock()
        except OSError as error:
            raise ConfigError(f"{directory}: takes a directory that can be written to ({error})") from error

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, digest: object) -> bool:
        return isinstance(digest, bytes) and digest not in self._bad and self._path(digest).exists()

    def get(self, digest: bytes) -> bytes | None:
        """Read and check a page; None, and a warning the first time, for a file that will not do."""
        if digest in self._bad:
            return None
        path = self._path(digest)
        try:
            page = decode(self._identity, digest, path.read_bytes())
            os.utime(path)
        except FileNotFoundError:
            self._forget(digest)
            return None
        except (OSError, UnusableFileError) as error:
            self._skip(digest, f"cannot be used: {error}")
            return None
        if digest in self._sizes:
            self._sizes.move_to_end(digest)
        return page

    def put(self, digest: bytes, data: bytes) -> list[Entry]:
        """Write a page's file; the least recently used files are deleted for it."""
        file = encode(self._identity, digest, data)
        self._forget(digest)
        try:
            self._write(self._path(digest), file)
        except OSError as error:
            self._skip(digest, f"cannot be written: {error}")
            return []
        self._bad.discard(digest)
        self._sizes[digest] = len(file)
        self._room -= len(file)
        while self._room < 0:
            self._delete(next(iter(self._sizes)))
        return []

    def drain(self) -> list[Entry]:
        """Return nothing: files outlive the process."""
        return []

    def _path(self, digest: bytes) -> Path:
        return self._folder / f"{digest.hex()}{_SUFFIX}"

    def _take_stock(self) -> None:
        """List the pages in the folder, the longest unused first, and remove what was never finished."""
        found = []
        for path in self._folder.iterdir():
            with suppress(FileNotFoundError):  # another process may be tidying up too
                if path.suffix == _UNFINISHED:
                    path.unlink()
                elif (digest := _named(path)) is not None:
                    status = path.stat()
                    found.append((status.st_mtime_ns, digest, status.st_size))
        for _, digest, size in sorted(found):
            self._sizes[digest] = size
            self._room -= size

    def _write(self, path: Path, file: bytes) -> None:
        handle, aside = tempfile.mkstemp(suffix=_UNFINISHED, dir=self._folder)
        try:
            with os.fdopen(handle, "wb") as stream:
                stream.write(file)
            os.replace(aside, path)
        except OSError:
            Path(aside).unlink(missing_ok=True)
            raise

    def _delete(self, digest: bytes) -> None:
        self._forget(digest)
        try:
            self._path(digest).unlink(missing_ok=True)
        except OSError as error:
            self._skip(digest, f"cannot be deleted: {error}")

    def _skip(self, digest: bytes, fault: str) -> None:
        self._forget(digest)
        self._bad.add(digest)
        warnings.warn(f"cached page {self._path(digest)} {fault}; it is skipped", RuntimeWarning, stacklevel=3)

    def _forget(self, digest: bytes) -> None:
        self._room += self._sizes.pop(digest, 0)


def _named(path: Path) -> bytes | None:
    """The digest in the name of a page's file; None for another file."""
    if path.suffix != _SUFFIX or len(path.stem) != 2 * DIGEST_BYTES:
        return None
    try:
        return bytes.fromhex(path.stem)
    except ValueError:
        return None
