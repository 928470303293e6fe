"""A name for a checkpoint's content: the same for copies, another where configuration, tokenizer or weights differ."""

from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

from deepinfer.core.errors import CheckpointError

_WHOLE_BYTES = 1 << 20  # a file up to this size is read whole
_SAMPLES, _SAMPLE_BYTES = 64, 4096  # else that much of it, evenly spread, its start and its end included
_NAMES = ("config.json", "tokenizer.json")


def checkpoint_identity(directory: Path) -> str:
    """32 hexadecimal digits that only equal checkpoints share; naming a model does not mean reading it.

    Weights are known by the names and sizes of their files and by samples of their bytes. Raises CheckpointError for a
    checkpoint that cannot be read.
    """
    state = blake2b(digest_size=16)
    try:
        for path in sorted([*directory.glob("*.safetensors"), *(directory / name for name in _NAMES)]):
            state.update(f"\n{path.name} {path.stat().st_size}\n".encode())
            for sample in _samples(path):
                state.update(sample)
    except OSError as error:
        raise CheckpointError(f"{directory}: cannot be read to tell which model it is ({error})") from error
    return state.hexdigest()


def _samples(path: Path) -> Iterator[bytes]:
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= _WHOLE_BYTES:
            yield file.read()
            return
        for number in range(_SAMPLES):
            file.seek((size - _SAMPLE_BYTES) * number // (_SAMPLES - 1))
            yield file.read(_SAMPLE_BYTES)
