"""The tiers from outside: pages that were evicted come back, also for the next process, and never wrong ones."""

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import tiny
from llm_tools import AGREE, Oracle, caches_of, check_at_rest, texts, tokens

from deepinfer import LLM, RequestOutput, SamplingParams

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
LONG, *OTHERS = texts(8, 4, 200, 200)
PAGES = 7  # room for two requests of four pages each: not quite

TIERS: dict[str, dict[str, Any]] = {
    "host": {"host_cache_bytes": 1 << 20},
    "disk": {"disk_cache": "pages"},
    "host, then disk": {"host_cache_bytes": 20_000, "disk_cache": "pages"},
}


@pytest.fixture(autouse=True)
def in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def oracle(tiny_checkpoint: Path) -> Oracle:
    return Oracle(tiny_checkpoint)


def small(directory: Path, **settings: Any) -> LLM:
    return LLM(directory, max_num_seqs=1, cache_bytes=caches_of(directory, PAGES, 1), **settings)


def ask(llm: LLM, prompt: list[int]) -> RequestOutput:
    return llm.generate(prompt, GREEDY, use_tqdm=False)[0]


def files() -> list[Path]:
    return sorted(Path("pages").rglob("*.page"))


@pytest.mark.parametrize("asynchronous", [True, False], ids=["asynchronous", "plain"])
@pytest.mark.parametrize("tier", TIERS)
def test_evicted_pages_come_back(tiny_checkpoint: Path, oracle: Oracle, tier: str, asynchronous: bool) -> None:
    llm = small(tiny_checkpoint, asynchronous=asynchronous, **TIERS[tier])
    ask(llm, LONG)
    for other in OTHERS:
        ask(llm, other)
    back = ask(llm, LONG)
    assert (back.cached_tokens, back.miss) == (192, None)
    assert oracle.agreement([back]) >= AGREE
    cache = llm.statistics.cache
    assert sum(cache.loaded_pages.values()) == 3
    assert set(cache.loaded_pages) <= {"host", "disk"}
    assert f"pages {cache.loaded_pages.most_common()[0][1]} from" in "\n".join(llm.statistics.lines())
    check_at_rest(llm)
    assert ask(llm, LONG).token_ids == back.token_ids
    assert sum(cache.loaded_pages.values()) == 3, "what came back stayed"


def test_without_a_tier_they_do_not(tiny_checkpoint: Path) -> None:
    llm = small(tiny_checkpoint)
    for prompt in (LONG, *OTHERS):
        ask(llm, prompt)
    again = ask(llm, LONG)
    assert (again.cached_tokens, again.miss) == (0, "evicted")


def test_pages_go_down_and_come_up_in_the_same_batch(tiny_checkpoint: Path, oracle: Oracle) -> None:
    """Prompts over and over, in places for three and pages for two: evicted, loaded, shared and preempted at once."""
    llm = LLM(
        tiny_checkpoint, max_num_seqs=3, max_chunk=50, cache_bytes=caches_of(tiny_checkpoint, 9, 3),
        host_cache_bytes=30_000, disk_cache="pages",
    )  # fmt: skip
    ask(llm, LONG)
    prompts = [[*prompt[: 130 + 9 * turn], turn] for turn in range(4) for prompt in (LONG, *OTHERS)]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert sum(llm.statistics.cache.loaded_pages.values()) > 3
    assert llm.statistics.cache.evicted_pages > 3
    assert oracle.agreement(outputs) >= AGREE
    check_at_rest(llm)


def test_the_next_process_hits(tiny_checkpoint: Path, oracle: Oracle) -> None:
    first = LLM(tiny_checkpoint, disk_cache="pages")
    ask(first, LONG)
    assert not files()
    first.close()
    warm = ask(first, LONG)
    assert len(files()) == 3
    second = LLM(tiny_checkpoint, disk_cache=Path("pages"))
    back = ask(second, LONG)
    assert (back.cached_tokens, back.miss) == (192, None)
    assert back.token_ids == warm.token_ids
    assert second.statistics.cache.loaded_pages == {"disk": 3}
    assert oracle.agreement([back]) >= AGREE
    check_at_rest(second)


def test_closing_twice_and_without_tiers_is_harmless(tiny_checkpoint: Path) -> None:
    for settings in ({}, {"disk_cache": "pages"}):
        llm = LLM(tiny_checkpoint, **settings)
        ask(llm, LONG)
        llm.close()
        written = {path: path.stat().st_mtime_ns for path in files()}
        llm.close()
        assert {path: path.stat().st_mtime_ns for path in files()} == written
        assert len(tokens([ask(llm, LONG)])[0]) == 8


def in_order(llm: LLM, prompt: list[int]) -> list[Path]:
    """The files of a prompt's pages: each is asked for in turn."""
    found: list[Path] = []
    for end in range(65, len(prompt), 64):
        ask(llm, prompt[:end])
        llm.close()
        found += [path for path in files() if path not in found]
    return found


def tear(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 4
    path.write_bytes(data)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def swap(path: Path) -> None:
    """Another page's file under this page's name."""
    path.write_bytes(next(other for other in files() if other != path).read_bytes())


@pytest.mark.parametrize("damage", [tear, flip, empty, swap])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_bad_file_is_skipped_with_a_warning(tiny_checkpoint: Path, oracle: Oracle, damage: Any, place: int) -> None:
    """What lies before it hits, and what lies behind it cannot be used."""
    damage(in_order(LLM(tiny_checkpoint, disk_cache="pages"), LONG)[place])
    llm = LLM(tiny_checkpoint, disk_cache="pages")
    with pytest.warns(RuntimeWarning, match=r"cached page .*\.page cannot be used: .*; it is skipped"):
        back = ask(llm, LONG)
    assert back.cached_tokens == place * 64
    assert oracle.agreement([back]) >= AGREE
    llm.close()  # the page was made anew
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ask(LLM(tiny_checkpoint, disk_cache="pages"), LONG).cached_tokens == 192


def test_an_unfinished_file_is_tidied_away(tiny_checkpoint: Path) -> None:
    llm = LLM(tiny_checkpoint, disk_cache="pages")
    ask(llm, LONG)
    llm.close()
    left = files()[0].with_name("half.tmp")
    left.write_bytes(b"half a page")
    assert ask(LLM(tiny_checkpoint, disk_cache="pages"), LONG).cached_tokens == 192
    assert not left.exists()


def test_other_weights_never_hit(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """Nor do other types and page sizes; and they do not disturb each other."""
    other = tiny.write(tmp_path / "other" / "checkpoint", seed=1)
    kinds: list[tuple[Path, dict[str, Any]]] = [
        (tiny_checkpoint, {}),
        (other, {}),
        (tiny_checkpoint, {"dtype": "bfloat16"}),
        (tiny_checkpoint, {"page_size": 32}),
    ]
    for directory, settings in kinds:
        llm = LLM(directory, disk_cache="pages", **settings)
        assert ask(llm, LONG).cached_tokens == 0
        llm.close()
    for directory, settings in kinds:
        assert ask(LLM(directory, disk_cache="pages", **settings), LONG).cached_tokens == 192


def test_another_replay_mode_does_not_hit(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(tiny_checkpoint, disk_cache="pages")
    ask(llm, LONG)
    llm.close()
    monkeypatch.setenv("DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE", "off")
    assert ask(LLM(tiny_checkpoint, disk_cache="pages"), LONG).cached_tokens == 0


def test_a_budget_is_kept(tiny_checkpoint: Path) -> None:
    llm = small(tiny_checkpoint, disk_cache="pages", disk_cache_bytes=25_000)
    for prompt in (LONG, *OTHERS):
        ask(llm, prompt)
    llm.close()
    sizes = [path.stat().st_size for path in files()]
    assert 0 < sum(sizes) <= 25_000 < sum(sizes) + sizes[0]


def test_a_disk_that_fails_costs_a_warning_and_no_request(
    tiny_checkpoint: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = small(tiny_checkpoint, disk_cache="pages")
    ask(llm, LONG)

    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.warns(RuntimeWarning, match="cannot be written: .*No space left on device"):
            outputs = llm.generate(OTHERS, GREEDY, use_tqdm=False)
    assert oracle.agreement(outputs) >= AGREE
    assert not files()
    again = ask(llm, LONG)
    assert oracle.agreement([again]) >= AGREE
    check_at_rest(llm)
