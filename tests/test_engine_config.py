"""EngineConfig: what cannot be is refused before anything is loaded, by name, with what would do."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from deepinfer import LLM, ConfigError
from deepinfer.config.engine import EngineConfig

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no request": ({"max_num_seqs": 0}, r"max_num_seqs is 0; it takes a whole number >= 1$"),
    "half a request": ({"max_num_seqs": 1.5}, r"max_num_seqs is 1\.5; it takes a whole number >= 1$"),
    "True requests": ({"max_num_seqs": True}, r"max_num_seqs is True; it takes a whole number >= 1$"),
    "no rows": ({"max_num_batched_tokens": 0}, r"max_num_batched_tokens is 0; it takes a whole number >= 1$"),
    "rows as text": (
        {"max_num_batched_tokens": "64"},
        r"max_num_batched_tokens is '64'; it takes a whole number >= 1$",
    ),
    "fewer rows than requests": (
        {"max_num_seqs": 8, "max_num_batched_tokens": 7},
        r"max_num_batched_tokens is 7; it takes at least max_num_seqs, 8",
    ),
    "empty chunks": ({"max_chunk": 0}, r"max_chunk is 0; it takes a whole number >= 1, or None$"),
    "a page of one token": ({"page_size": 1}, r"page_size is 1; it takes a whole number >= 2$"),
    "an odd page": ({"page_size": 65}, r"page_size is 65; it takes an even number"),
    "no page size": ({"page_size": None}, r"page_size is None; it takes a whole number >= 2$"),
    "no caches": ({"cache_bytes": 0}, r"cache_bytes is 0; it takes a whole number >= 1, or None$"),
    "a size as text": ({"cache_bytes": "1GiB"}, r"cache_bytes is '1GiB'; it takes a whole number >= 1, or None$"),
    "a debt of memory": ({"host_cache_bytes": -1}, r"host_cache_bytes is -1; it takes a whole number >= 0$"),
    "no host budget": ({"host_cache_bytes": None}, r"host_cache_bytes is None; it takes a whole number >= 0$"),
    "no disk budget": ({"disk_cache_bytes": 0}, r"disk_cache_bytes is 0; it takes a whole number >= 1$"),
    "a directory number": ({"disk_cache": 3}, r"disk_cache is 3; it takes the path of a directory, or None$"),
    "a word for a switch": ({"asynchronous": "no"}, r"asynchronous is 'no'; it takes True or False$"),
    "a number for a switch": ({"prefix_cache": 0}, r"prefix_cache is 0; it takes True or False$"),
    "half precision": ({"dtype": "float16"}, r"dtype is 'float16'; it takes float32 or bfloat16, or None"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_value_that_cannot_be(tiny_checkpoint: Path, case: str) -> None:
    settings, message = BAD[case]
    for make in (EngineConfig, lambda **given: LLM(tiny_checkpoint, **given)):
        with pytest.raises(ConfigError, match=message):
            make(**settings)


def test_the_defaults_and_the_smallest_values_are_taken() -> None:
    EngineConfig()
    EngineConfig(1, 1, 1, 2, 1, 0, "somewhere", 1, False, False, "bfloat16")


def test_an_unknown_setting_is_named_and_the_known_ones_listed(tiny_checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="LLM has no setting 'max_seqs'") as caught:
        LLM(tiny_checkpoint, max_seqs=3)
    assert all(field.name in str(caught.value) for field in fields(EngineConfig))


def test_caches_too_small_for_anything_say_what_they_take(tiny_checkpoint: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"the caches have 1000 bytes; .*take (\d+); set cache_bytes higher"
    ) as caught:
        LLM(tiny_checkpoint, cache_bytes=1000)
    least = int(str(caught.value).split(" take ")[1].split(";")[0])
    LLM(tiny_checkpoint, cache_bytes=least)
    with pytest.raises(ConfigError):
        LLM(tiny_checkpoint, cache_bytes=least - 1)


def test_a_disk_cache_that_cannot_be_is_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    with pytest.raises(ConfigError, match=r"file.*takes a directory that can be written to"):
        LLM(tiny_checkpoint, disk_cache=tmp_path / "file")
