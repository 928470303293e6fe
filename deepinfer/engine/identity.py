"""A checkpoint's identity: pages of KV on disk are only good for the weights that made them."""

from hashlib import blake2b
from pathlib import Path

_SAMPLES, _SAMPLE_BYTES = 64, 4096


def checkpoint_identity(directory: Path) -> str:
    """Digest of config, index and, of every shard, size, header and evenly spread samples.

    Reading 500 GB would take minutes; another training run changes every sample.
    """
    digest = blake2b(digest_size=16)
    for file in sorted(directory.glob("*.json")):
        digest.update(file.name.encode() + file.read_bytes())
    for file in sorted(directory.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as shard:
            for sample in range(_SAMPLES):
                shard.seek(max(0, size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
                digest.update(shard.read(_SAMPLE_BYTES))
    return digest.hexdigest()
