"""The device tensors: shapes, bytes as promised, pages out to the host and back in."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_models import VARIANTS
from released_config import golden, released

from deepinfer.cache.budget import CacheSizes
from deepinfer.cache.storage import Caches
from deepinfer.config.model import ModelConfig
from deepinfer.core.errors import ConfigError
from deepinfer.ops import kv_formats


def config_of(data: dict[str, Any]) -> ModelConfig:
    return ModelConfig.from_dict(data, "test")


def golden_caches(pages: int = 9, slots: int = 3, **sizes: int) -> Caches:
    return Caches(config_of(golden()), pages, slots, **sizes)


def filled(pages: int = 9) -> Caches:
    caches = golden_caches(pages, page_size=4)
    generator = torch.Generator().manual_seed(0)
    for part in (*caches.latents, *caches.index_keys):
        part.copy_(torch.randint(0, 256, part.shape, dtype=torch.uint8, generator=generator))
    return caches


def tensors(caches: Caches) -> list[torch.Tensor]:
    """Every tensor that the caches own."""
    owned = [value for value in vars(caches).values() if isinstance(value, torch.Tensor)]
    return [*owned, *caches.latents, *caches.index_keys]


def test_shapes_of_the_golden_model() -> None:
    caches = golden_caches(pages=9, slots=3, page_size=8, verify_rows=6)
    assert [part.shape for part in caches.latents] == [(9, 4, 64 // 2 + 64 // 16), (9, 8, 36)]
    assert [part.shape for part in caches.index_keys] == [(9, 4, 32 // 2 + 1), (9, 8, 17)]
    assert caches.windows.shape == (8, 3, 16 + 6, 64 + 2)
    assert caches.drafts.shape == (2, 3, 22, 66)
    assert caches.pairs.shape == (1, 3, 4, 2, 64)
    assert caches.history.shape == (3, 9)
    assert caches.page_table.shape == (3, 9)
    assert caches.newest.shape == (3,)
    kinds = {part.dtype for part in (*caches.latents, *caches.index_keys, caches.windows, caches.drafts)}
    assert kinds == {torch.uint8}
    assert caches.pairs.dtype == torch.float32
    assert {caches.history.dtype, caches.page_table.dtype, caches.newest.dtype} == {torch.int64}


def test_without_speculation_there_is_one_pair() -> None:
    caches = golden_caches()
    assert caches.ring == 17
    assert caches.pairs.shape[2] == 1
    assert caches.history.shape[1] == 3


def test_a_page_list_is_as_long_as_the_model_allows() -> None:
    assert golden_caches(pages=2000, slots=1, page_size=4).page_table.shape == (1, 1024)


@pytest.mark.parametrize("make", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize(("pages", "slots", "page_size", "verify_rows"), [(1, 1, 2, 1), (40, 5, 16, 6)])
def test_the_budget_is_what_is_allocated(make: Any, pages: int, slots: int, page_size: int, verify_rows: int) -> None:
    config = config_of(make())
    caches = Caches(config, pages, slots, page_size, verify_rows)
    sizes = CacheSizes(config, slots, page_size, verify_rows)
    assert sum(part.nbytes for part in tensors(caches)) == sizes.total(pages)
    assert sum(part.nbytes for part in (*caches.latents, *caches.index_keys)) == pages * caches.page_bytes


def test_the_budget_of_the_released_shape_is_what_would_be_allocated() -> None:
    config = config_of(released())
    with torch.device("meta"):
        caches = Caches(config, 100_000, 64, 64, 6, "meta")
    assert sum(part.nbytes for part in tensors(caches)) == CacheSizes(config, 64, 64, 6).total(100_000)


@settings(max_examples=200, deadline=None)
@given(memory=st.integers(0, 20_000_000), slots=st.integers(1, 40), half_page=st.integers(1, 40))
def test_as_many_pages_as_fit(memory: int, slots: int, half_page: int) -> None:
    sizes = CacheSizes(config_of(golden()), slots, 2 * half_page)
    pages = sizes.pages_in(memory)
    assert pages >= 0
    assert sizes.total(pages + 1) > memory
    assert pages == 0 or sizes.total(pages) <= memory


@pytest.mark.parametrize("context", [0, 4097])
def test_a_context_that_the_model_does_not_have(context: int) -> None:
    sizes = CacheSizes(config_of(golden()), 4)
    with pytest.raises(ConfigError, match=f"context is {context} tokens; this model takes 1 to 4096"):
        sizes.pages_for(context, 4)


def test_pages_for_requests() -> None:
    sizes = CacheSizes(config_of(golden()), 4, page_size=64)
    assert [sizes.pages_for(context, 3) for context in (1, 64, 65, 4096)] == [3, 3, 6, 192]


def test_pages_go_to_the_host_and_back() -> None:
    caches = filled()
    data = caches.read_pages([7, 2])
    assert [len(page) for page in data] == [caches.page_bytes] * 2
    untouched = [part.clone() for part in (*caches.latents, *caches.index_keys)]
    caches.write_pages([0, 5], data)
    for part, before in zip((*caches.latents, *caches.index_keys), untouched, strict=True):
        assert torch.equal(part[[0, 5]], before[[7, 2]])
        others = [1, 2, 3, 4, 6, 7, 8]
        assert torch.equal(part[others], before[others])
    assert caches.read_pages([5, 0, 2]) == [data[1], data[0], data[1]]


def test_bytes_of_a_page_are_source_by_source() -> None:
    caches = filled()
    parts = [part[3] for pair in zip(caches.latents, caches.index_keys, strict=True) for part in pair]
    assert caches.read_pages([3]) == [b"".join(part.numpy().tobytes() for part in parts)]


def test_no_pages_are_read_and_written_as_none() -> None:
    caches = filled()
    assert caches.read_pages([]) == []
    before = caches.latents[0].clone()
    caches.write_pages([], [])
    assert torch.equal(caches.latents[0], before)


def test_a_page_of_another_layout_is_refused() -> None:
    caches = filled()
    with pytest.raises(RuntimeError):
        caches.write_pages([0], [bytes(caches.page_bytes - 1)])


def test_memory_begins_as_finite_numbers() -> None:
    caches = golden_caches()
    for part in caches.latents:
        assert not kv_formats.unpack_latent(part, torch.float32).any()
    for part in caches.index_keys:
        assert not kv_formats.unpack_index(part, torch.float32).any()
    assert not kv_formats.unpack_window(caches.windows, torch.float32).any()
    assert not caches.pairs.any()


@pytest.mark.parametrize("name", ["pages", "slots", "verify_rows"])
def test_sizes_below_one_are_refused(name: str) -> None:
    sizes = {"pages": 1, "slots": 1, "verify_rows": 1, name: 0}
    with pytest.raises(ConfigError, match=f"{name} is 0; it takes at least 1"):
        Caches(config_of(golden()), **sizes)


def test_an_odd_page_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="page size is 7"):
        golden_caches(page_size=7)
