"""A name for everything beside the tokens that decides what a cached page holds."""

from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

from deepinfer.cache.layout import CacheLayout
from deepinfer.core.errors import CheckpointError

_WHOLE_BYTES = 1 << 20  # a file up to this size is read whole
_SAMPLES, _SAMPLE_BYTES = 64, 4096  # else that much of it, evenly spread, its start and its end included
_NAMES = ("config.json", "tokenizer.json")


def cache_identity(directory: Path, layout: CacheLayout, page_size: int, compute: str) -> str:
    """Equal only for the same model, computed in the same type, with the same layout of a page.

    The model is known by its configuration, its tokenizer (from which n-gram classes follow) and its weights: their
    sizes and samples of their bytes, so that naming a model does not mean reading it. `compute` names the type of the
    activations. Raises CheckpointError for a checkpoint that cannot be read.
    """
    state = blake2b(f"{layout}, {page_size} tokens a page, {compute}".encode(), digest_size=16)
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
