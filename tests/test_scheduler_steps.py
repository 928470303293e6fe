"""What single steps hold: decode rows, chunks, replayed rows, and what each span says of itself."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduler_fakes import SHARED, FakePages, commit, make_scheduler, request, run, shape


def test_a_request_from_first_to_last_step():
    scheduler = make_scheduler(FakePages())
    scheduler.add(request([5, 6, 8], max_tokens=3))
    seen = []
    while scheduler.has_work():
        plan, (job,) = run(scheduler)
        (span,) = plan.spans
        seen.append((plan.number, span.first, span.token_ids, span.sample, job.sequence.finish_reason))
    assert seen == [
        (0, 0, (5, 6, 8), True, None),
        (1, 3, (7,), True, None),
        (2, 4, (7,), True, "length"),
    ]
    assert scheduler.plan() is None


def test_decode_rows_come_first_then_begun_prompts_then_new_ones():
    scheduler = make_scheduler(FakePages(total_pages=99), budget=8, chunk=3)
    decoding = scheduler.add(request([1, 2], max_tokens=9))
    run(scheduler)
    begun = scheduler.add(request(range(7), priority=5))
    assert shape(run(scheduler)[0]) == [(decoding, 2, 1), (begun, 0, 3)]
    new = scheduler.add(request(range(2)))
    assert shape(run(scheduler)[0]) == [(decoding, 3, 1), (begun, 3, 3), (new, 0, 2)]
    assert shape(run(scheduler)[0]) == [(decoding, 4, 1), (new, 2, 1), (begun, 6, 1)]
    assert shape(run(scheduler)[0]) == [(decoding, 5, 1), (new, 3, 1), (begun, 7, 1)]


def test_a_long_prompt_never_holds_up_those_who_decode():
    scheduler = make_scheduler(FakePages(total_pages=99), budget=5)
    decoding = [scheduler.add(request([1], max_tokens=30)) for _ in range(3)]
    run(scheduler)
    long = scheduler.add(request(range(30)))
    for step in range(15):
        plan, extended = run(scheduler)
        assert shape(plan)[:3] == [(each, step + 1, 1) for each in decoding]
        assert shape(plan)[3] == (long, 2 * step, 2)
        assert len(extended) == 3 + (step == 14)


@given(st.integers(1, 20), st.integers(1, 8), st.integers(4, 10))
def test_chunks_cover_a_prompt_once_and_only_the_last_samples(length: int, chunk: int, budget: int):
    scheduler = make_scheduler(FakePages(total_pages=99), budget=budget, chunk=chunk)
    prompt = tuple(range(100, 100 + length))
    scheduler.add(request(prompt, max_tokens=1))
    spans = []
    while scheduler.has_work():
        spans += run(scheduler)[0].spans
    assert sum((span.token_ids for span in spans), ()) == prompt
    assert [span.first for span in spans] == list(range(0, length, min(chunk, budget)))
    assert [span.sample for span in spans] == [False] * (len(spans) - 1) + [True]


def test_pages_are_told_once_and_again_only_when_they_change():
    scheduler = make_scheduler(FakePages(page_size=4))
    scheduler.add(request(range(2, 8), max_tokens=7))
    told = []
    while scheduler.has_work():
        told.append(dict(run(scheduler)[0].pages))
    assert told == [{0: (0, 1)}, {}, {}, {0: (0, 1, 2)}, {}, {}, {}]


def test_the_lowest_free_slot_is_taken():
    scheduler = make_scheduler(FakePages(), slots=3)
    ids = [scheduler.add(request([1], max_tokens=9)) for _ in range(3)]
    late = scheduler.add(request([1], max_tokens=9))
    assert [span.slot for span in run(scheduler)[0].spans] == [0, 1, 2]
    scheduler.cancel(ids[1])
    assert {span.request_id: span.slot for span in run(scheduler)[0].spans} == {ids[0]: 0, ids[2]: 2, late: 1}


@pytest.mark.parametrize(
    ("mode", "start", "decoder_from"), [("compact", 14, 14), ("mask", 14, 0), ("off", 0, 0)], ids=str
)
def test_decoder_rows_begin_at_the_replay_start(mode: str, start: int, decoder_from: int):
    """A prompt of 20 tokens of which the last 6 are kept."""
    scheduler = make_scheduler(FakePages(), chunk=8, mode=mode)
    scheduler.add(request(range(2, 22), max_tokens=2))
    while scheduler.has_work():
        for span in run(scheduler)[0].spans:
            assert (span.cut, span.decoder_from, span.floor, span.write_from) == (start, decoder_from, 0, 0)


@pytest.mark.parametrize(
    ("hit", "first"),
    [(0, 0), (4, 0), (8, 4), (12, 8), (16, 10)],
    ids=["no hit", "within the window", "behind it", "before the replay start", "beyond the replay start"],
)
def test_a_hit_goes_back_one_window_from_its_end_or_from_the_replay_start(hit: int, first: int):
    """A prompt of 20 tokens, replayed from 14; the window holds 4."""
    kv = FakePages(hits={0: hit})
    scheduler = make_scheduler(kv, budget=30)
    scheduler.add(request(range(2, 22)))
    plan, (job,) = run(scheduler)
    (span,) = plan.spans
    assert (span.first, span.floor, span.count) == (first, first, 20 - first)
    assert span.token_ids == tuple(range(2 + first, 22))
    assert (span.write_from, span.cut, span.decoder_from) == (hit, 14, 14)
    assert plan.pages[0] == (*range(SHARED, SHARED + hit // 4), *range(5 - hit // 4))
    assert job.hit_tokens == hit


def test_without_bounded_replay_a_hit_saves_pages_but_no_rows():
    scheduler = make_scheduler(FakePages(hits={0: 16}), budget=30, mode="off")
    scheduler.add(request(range(2, 22)))
    (span,) = run(scheduler)[0].spans
    assert (span.first, span.count, span.write_from) == (0, 20, 16)


def test_the_mode_can_forbid_hits():
    scheduler = make_scheduler(FakePages(hits={0: 16}), budget=30, prefix_hits=False)
    scheduler.add(request(range(2, 22)))
    plan, (job,) = run(scheduler)
    assert (plan.spans[0].first, job.hit_tokens, job.miss) == (0, 0, "mode forbids")


def test_whole_pages_are_published_once_written_prompt_and_reply():
    kv = FakePages(page_size=4, hits={0: 4})
    scheduler = make_scheduler(kv, chunk=5)
    scheduler.add(request(range(2, 12), max_tokens=20))
    log = []
    for _ in range(9):
        run(scheduler, token=len(log) + 20)
        log.append(len(kv.published.get(0, ())))
    assert log == [0, 4, 4, 8, 8, 8, 8, 12, 12]
    assert kv.published[0] == [*range(6, 12), 21, 22, 23, 24, 25, 26]


def test_pages_are_asked_for_only_where_one_ends():
    """No work per page and step: in 40 steps of 4 requests, a call for each page of 4 tokens."""
    kv = FakePages(total_pages=99, page_size=4)
    scheduler = make_scheduler(kv)
    for _ in range(4):
        scheduler.add(request(range(2, 6), max_tokens=50))
    run(scheduler)
    kv.calls.clear()
    for _ in range(40):
        run(scheduler)
    assert kv.calls.count("extend") == kv.calls.count("publish") == 40
    assert len(kv.calls) == 80


def test_a_prompt_that_does_not_fit_is_asked_for_again_only_when_something_changed():
    kv = FakePages(total_pages=4, page_size=4)
    scheduler = make_scheduler(kv)
    scheduler.add(request(range(8), max_tokens=4))
    blocked = scheduler.add(request(range(10)))
    for _ in range(4):
        run(scheduler)
    assert kv.calls.count("admit") == 3  # the first; the blocked one; the blocked one, with one page less
    assert kv.held.keys() == set()
    assert shape(run(scheduler)[0]) == [(blocked, 0, 10)]


def test_statistics_add_up():
    scheduler = make_scheduler(FakePages(), budget=4, slots=2)
    scheduler.add(request(range(2, 8), max_tokens=2))
    scheduler.add(request([3], max_tokens=2))
    while scheduler.has_work():
        run(scheduler)
    figures = scheduler.statistics
    assert (figures.added, figures.finished, figures.ended) == (2, 2, 2)
    assert (figures.prefill_rows, figures.decode_rows, figures.generated_tokens) == (7, 2, 4)
    assert (figures.steps, figures.largest_step, figures.spans) == (3, 4, 5)
    assert figures.mean_step == pytest.approx(9 / 3)
    assert figures.mean_requests == pytest.approx(5 / 3)


def test_statistics_of_nothing():
    figures = make_scheduler(FakePages()).statistics
    assert (figures.mean_step, figures.mean_requests, figures.ended) == (0, 0, 0)


def test_counts_of_those_who_wait_and_run():
    scheduler = make_scheduler(FakePages(), slots=2, budget=6)
    for _ in range(3):
        scheduler.add(request(range(4), max_tokens=2))
    assert (scheduler.num_waiting, scheduler.num_running) == (3, 0)
    plan = scheduler.plan()
    assert (scheduler.num_waiting, scheduler.num_running) == (1, 2)
    commit(scheduler, plan)
