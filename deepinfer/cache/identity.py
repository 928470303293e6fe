"""A name for everything beside the tokens that decides what a cached page holds."""

from hashlib import blake2b
from pathlib import Path

from deepinfer.cache.layout import CacheLayout
from deepinfer.checkpoint.identity import checkpoint_identity


def cache_identity(directory: Path, layout: CacheLayout, page_size: int, compute: str) -> str:
    """Equal only for the same model, computed in the same type, with the same layout of a page.

    The model is known by its checkpoint's content: configuration, tokenizer (from which n-gram classes follow) and
    weights. `compute` names the type of the activations. Raises CheckpointError for a checkpoint that cannot be read.
    """
    every = f"{layout}, {page_size} tokens a page, {compute}, {checkpoint_identity(directory)}"
    return blake2b(every.encode(), digest_size=16).hexdigest()
