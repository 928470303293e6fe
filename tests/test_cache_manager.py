"""The KV manager: admission, sharing, publishing, eviction, tiers; one request's view of it."""

from collections.abc import Sequence

import pytest

from deepinfer.cache.manager import KVManager
from deepinfer.cache.tiers import HostTier
from deepinfer.core.errors import ConfigError
from deepinfer.core.plan import Admitted

SIZE = 4


class Device:
    """Stands for the device: a page's bytes are its number, so a test can see whose they were."""

    def __init__(self) -> None:
        self.reads: list[list[int]] = []

    def read_pages(self, pages: Sequence[int]) -> list[bytes]:
        self.reads.append(list(pages))
        return [bytes([page]) for page in pages]


def manager(pages: int = 10, tiers: Sequence[HostTier] = (), device: Device | None = None) -> KVManager:
    return KVManager(pages, SIZE, "model", device, tiers)


def admit(kv: KVManager, request: int, keys: str, **options: int) -> Admitted:
    admitted = kv.admit(request, keys, len(keys), **options)
    assert admitted is not None
    return admitted


def serve(kv: KVManager, request: int, keys: str) -> Admitted:
    """Run a request from beginning to end."""
    admitted = admit(kv, request, keys)
    kv.publish(request, keys[admitted.hit_tokens : len(keys) // SIZE * SIZE])
    kv.release(request)
    kv.check_integrity()
    return admitted


def test_a_first_request_gets_fresh_pages() -> None:
    kv = manager()
    admitted = admit(kv, 1, "aaaabbbbc")
    assert len(admitted.pages) == 3
    assert (admitted.hit_tokens, admitted.miss, admitted.loads) == (0, "first seen", ())
    assert kv.pages_of(1) == admitted.pages
    assert (kv.total_pages, kv.available_pages) == (10, 7)


def test_pages_are_found_again_after_the_request() -> None:
    kv = manager()
    first = serve(kv, 1, "aaaabbbbc")
    assert (kv.available_pages, kv.idle_pages) == (10, 2)
    again = admit(kv, 2, "aaaabbbbd")
    assert (again.hit_tokens, again.miss) == (8, None)
    assert again.pages[:2] == first.pages[:2]


def test_pages_are_shared_while_their_writer_runs() -> None:
    kv = manager()
    first = admit(kv, 1, "aaaabbbbc")
    kv.publish(1, "aaaabbbb")
    second = admit(kv, 2, "aaaabbbbd")
    assert second.pages[:2] == first.pages[:2]
    assert second.pages[2] != first.pages[2]
    kv.release(1)
    kv.check_integrity()
    assert kv.idle_pages == 0, "the second request still holds them"


def test_nothing_is_found_before_it_is_published() -> None:
    kv = manager()
    admit(kv, 1, "aaaabbbbc")
    assert admit(kv, 2, "aaaabbbbc").hit_tokens == 0
    kv.publish(1, "aaaa")
    assert admit(kv, 3, "aaaabbbbc").hit_tokens == 4


def test_a_hit_leaves_the_last_token_to_run() -> None:
    kv = manager()
    serve(kv, 1, "aaaabbbb")
    assert admit(kv, 2, "aaaabbbb").hit_tokens == 4


def test_a_hit_stays_within_the_tokens_asked_for() -> None:
    kv = manager()
    serve(kv, 1, "aaaabbbbcccc")
    admitted = kv.admit(2, "aaaabbbbcccc", 5)
    assert admitted is not None
    assert (admitted.hit_tokens, len(admitted.pages)) == (4, 2)


def test_generated_tokens_have_pages_and_are_found_too() -> None:
    kv = manager()
    admit(kv, 1, "aaaab")
    kv.publish(1, "aaaa")
    assert kv.extend(1, 8) == []
    new = kv.extend(1, 13)
    assert new is not None
    assert kv.pages_of(1)[2:] == tuple(new)
    kv.publish(1, "bcdefghi")
    kv.release(1)
    assert admit(kv, 2, "aaaabcdefghi?").hit_tokens == 12


def test_modes_can_forbid_hits() -> None:
    kv = manager()
    serve(kv, 1, "aaaab")
    admitted = admit(kv, 2, "aaaab", may_hit=False)
    assert (admitted.hit_tokens, admitted.miss) == (0, "mode forbids")
    kv.publish(2, "aaaa")
    kv.release(2)
    kv.check_integrity()


def test_refused_for_lack_of_pages() -> None:
    kv = manager(pages=4)
    admit(kv, 1, "aaaab")
    kv.publish(1, "aaaa")
    assert kv.admit(2, "ccccddddee", 10, spare=0) is None
    assert kv.extend(1, 17) is None
    assert (kv.available_pages, len(kv.pages_of(1))) == (2, 2)
    assert kv.admit(2, "ccccd", 5, spare=1) is None
    assert kv.admit(2, "ccccd", 5, spare=0) is not None


def test_hits_need_no_fresh_pages_but_idle_ones_are_no_longer_available() -> None:
    kv = manager(pages=4)
    serve(kv, 1, "aaaabbbbcccc")
    assert kv.idle_pages == 3
    assert kv.admit(2, "aaaabbbbccccd", 13, spare=1) is None
    assert admit(kv, 2, "aaaabbbbccccd", spare=0).hit_tokens == 12


def test_the_least_recently_used_prefix_is_evicted_from_its_end() -> None:
    kv = manager(pages=5)
    serve(kv, 1, "aaaabbbb")
    serve(kv, 2, "ccccdddd")
    admit(kv, 3, "zzzzz")
    kv.check_integrity()
    assert kv.statistics.evicted_pages == 1
    kv.release(3)
    assert admit(kv, 4, "aaaabbbb?").miss == "evicted"
    kv.release(4)
    assert admit(kv, 5, "ccccdddd?").hit_tokens == 8


def test_two_writers_of_the_same_content_keep_their_own_pages() -> None:
    kv = manager()
    first, second = admit(kv, 1, "aaaab"), admit(kv, 2, "aaaac")
    kv.publish(1, "aaaa")
    kv.publish(2, "aaaa")
    kv.check_integrity()
    assert not set(first.pages) & set(second.pages)
    kv.release(1)
    kv.release(2)
    assert (kv.idle_pages, kv.available_pages) == (1, 10), "the second copy is free at once"


def test_what_stood_on_another_writers_page_starts_over_when_that_is_evicted() -> None:
    kv = manager(pages=6)
    admit(kv, 1, "aaaa?")
    admit(kv, 2, "aaaabbbbcccc")
    kv.publish(1, "aaaa")
    kv.publish(2, "aaaabbbb")
    kv.release(1)
    assert kv.idle_pages == 1
    admit(kv, 3, "zzzzyyyyx")
    kv.check_integrity()
    kv.publish(2, "cccc")
    kv.check_integrity()
    own = kv.pages_of(2)
    kv.release(3)
    assert admit(kv, 4, "aaaabbbbcccc?").pages[:3] == own


def test_a_request_holds_pages_once() -> None:
    kv = manager()
    admit(kv, 1, "aaaab")
    with pytest.raises(ValueError, match="request 1 holds pages already"):
        kv.admit(1, "aaaab", 5)


@pytest.mark.parametrize("keys", ["a", "aaaaa", "aaaabbbbcccc"])
def test_only_whole_pages_that_it_holds_are_published(keys: str) -> None:
    kv = manager()
    admit(kv, 1, "aaaab")
    with pytest.raises(ValueError, match="request 1"):
        kv.publish(1, keys)
    kv.check_integrity()


def test_an_odd_page_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="page size is 3"):
        KVManager(4, 3, "model")


def test_evicted_pages_go_to_a_tier_and_come_back() -> None:
    device = Device()
    kv = manager(3, [HostTier(100)], device)
    first = serve(kv, 1, "aaaabbbbc")
    serve(kv, 2, "zzzzyyyyx")
    assert sorted(page for pages in device.reads for page in pages) == sorted(first.pages[:2])
    again = admit(kv, 3, "aaaabbbbd")
    assert (again.hit_tokens, again.miss) == (8, None)
    assert [load.page for load in again.loads] == list(again.pages[:2])
    assert [load.data for load in again.loads] == [bytes([page]) for page in first.pages[:2]]
    kv.check_integrity()
    assert kv.statistics.loaded_pages == {"host": 2}


def test_a_hit_may_begin_on_the_device_and_go_on_in_a_tier() -> None:
    kv = manager(4, [HostTier(100)], Device())
    first = serve(kv, 1, "aaaabbbbc")
    serve(kv, 2, "zzzzyyyyx")
    again = admit(kv, 3, "aaaabbbbd")
    assert again.pages[0] == first.pages[0]
    assert (again.hit_tokens, [load.page for load in again.loads]) == (8, [again.pages[1]])


def test_loaded_pages_are_their_requests_own_until_it_publishes() -> None:
    kv = manager(6, [HostTier(100)], Device())
    serve(kv, 1, "aaaabbbbc")
    serve(kv, 2, "zzzzyyyyxxxxwwwwvvvvu")
    first = admit(kv, 4, "aaaabbbbc")
    assert len(first.loads) == 2
    second = admit(kv, 5, "aaaabbbbd")
    assert not set(second.pages) & set(first.pages)
    kv.publish(4, "")
    kv.release(5)
    assert set(admit(kv, 6, "aaaabbbbe").pages[:2]) == set(first.pages[:2])
    kv.check_integrity()


def test_loaded_pages_of_a_failed_step_are_gone_and_the_tier_still_has_them() -> None:
    kv = manager(3, [HostTier(100)], Device())
    serve(kv, 1, "aaaabbbbc")
    serve(kv, 2, "zzzzyyyyx")
    assert len(admit(kv, 3, "aaaabbbbd").loads) == 2
    kv.release(3)
    kv.check_integrity()
    assert kv.idle_pages == 0
    assert len(admit(kv, 4, "aaaabbbbd").loads) == 2


def test_pages_that_cannot_be_read_are_only_lost_to_the_tiers() -> None:
    class Broken(Device):
        def read_pages(self, pages: Sequence[int]) -> list[bytes]:
            raise RuntimeError("an ill device")

    kv = manager(3, [HostTier(100)], Broken())
    serve(kv, 1, "aaaabbbbc")
    with pytest.warns(RuntimeWarning, match="2 pages could not be copied .* an ill device"):
        serve(kv, 2, "zzzzyyyyx")
    kv.check_integrity()
    with pytest.warns(RuntimeWarning, match="an ill device"):
        assert admit(kv, 3, "aaaabbbbd").hit_tokens == 0
    assert kv.statistics.stored_pages == 0


def test_a_tier_that_ends_early_says_why() -> None:
    kv = manager(3, [HostTier(1)], Device())
    serve(kv, 1, "aaaabbbbc")
    serve(kv, 2, "zzzzyyyyx")
    third = admit(kv, 3, "aaaabbbbc")
    assert (third.hit_tokens, third.miss) == (4, "evicted"), "the beginning is evicted last, so the tier has it"


def test_a_tier_may_not_know_how_a_prefix_goes_on() -> None:
    kv = manager(3, [HostTier(100)], Device())
    serve(kv, 1, "aaaabbbbc")
    serve(kv, 2, "zzzzyyyyx")
    third = admit(kv, 3, "aaaaqqqqq")
    assert (third.hit_tokens, third.miss) == (4, "first seen")


def test_tiers_are_not_asked_when_hits_are_forbidden_or_pages_lack() -> None:
    tier = HostTier(100)
    kv = manager(3, [tier], Device())
    serve(kv, 1, "aaaabbbbc")
    serve(kv, 2, "zzzzyyyyx")
    assert admit(kv, 3, "aaaabbbbd", may_hit=False).loads == ()
    assert kv.admit(4, "aaaabbbbd", 9) is None
    assert kv.statistics.loaded_pages == {}


def test_what_a_tier_has_is_not_read_again() -> None:
    device = Device()
    kv = manager(3, [HostTier(100)], device)
    for request in range(6):
        serve(kv, request, ["aaaabbbbc", "zzzzyyyyx"][request % 2])
    assert sum(map(len, device.reads)) == 4
    assert kv.statistics.stored_pages == 4


def test_without_a_reader_tiers_are_not_used() -> None:
    tier = HostTier(100)
    kv = manager(2, [tier])
    serve(kv, 1, "aaaab")
    serve(kv, 2, "zzzzy")
    assert len(tier) == 0


def test_persisting_copies_idle_pages_down() -> None:
    upper, lower = HostTier(100), HostTier(100)
    device = Device()
    kv = manager(6, [upper, lower], device)
    serve(kv, 1, "aaaabbbbc")
    admit(kv, 2, "zzzzy")
    kv.publish(2, "zzzz")
    kv.persist()
    assert (len(upper), len(lower)) == (2, 2)
    restarted = manager(6, [lower], device)
    assert admit(restarted, 1, "aaaabbbbc").hit_tokens == 8


def test_statistics_count_hits_and_why_they_ended() -> None:
    kv = manager(6)
    serve(kv, 1, "aaaabbbbc")
    serve(kv, 2, "aaaabbbbd")
    serve(kv, 3, "aaaabzzzz")
    serve(kv, 4, "aaaabyyyy")
    serve(kv, 5, "a")
    statistics = kv.statistics
    assert (statistics.admissions, statistics.prompt_tokens, statistics.hit_tokens) == (5, 37, 16)
    assert statistics.misses == {"first seen": 1, "differs": 2, "too short": 1}
