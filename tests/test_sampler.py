"""The sampler: what each option does to a distribution, in which order, at the edges, and a row's draw is its own."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_reference import adjusted, distribution
from torch import Tensor

from deepinfer.core.batch import Batch, Half, Pairs
from deepinfer.core.plan import Span
from deepinfer.core.request import Request
from deepinfer.core.sampled import Sampled, SampledRow, TokenMasks
from deepinfer.core.sampling_params import SamplingParams
from deepinfer.sampling.sampler import Sampler

EOS = 3


@dataclass
class Row:
    """A row of logits and the request that it belongs to."""

    logits: np.ndarray
    params: SamplingParams
    seed: int = 0
    prompt: list[int] = field(default_factory=lambda: [1])
    generated: list[int] = field(default_factory=list)
    allowed: set[int] | None = None
    position: int | None = None


class Bench:
    """A sampler with the requests of some rows, each in a slot of its own, their tokens read."""

    def __init__(self, rows: Sequence[Row], forbidden: Sequence[int] = ()) -> None:
        vocabulary = len(rows[0].logits)
        banned = torch.zeros(vocabulary, dtype=torch.bool)
        banned[list(forbidden)] = True
        self.sampler = Sampler(banned, len(rows), EOS)
        self.logits = torch.tensor(np.stack([row.logits for row in rows]), dtype=torch.float32)
        self.rows = []
        for number, row in enumerate(rows):
            self.sampler.admit(number, Request(0, None, tuple(row.prompt), (), (), row.params, row.seed))
            read(self.sampler, number, number, 0, [*row.prompt, *row.generated])
            end = len(row.prompt) + len(row.generated)
            self.rows.append(SampledRow(number, number, end if row.position is None else row.position))
        self.masks = masks_of([row.allowed for row in rows], vocabulary)

    def adjust(self) -> Tensor:
        return self.sampler.adjust(self.logits.clone(), self.rows, self.masks)

    def sample(self) -> Sampled:
        return self.sampler.sample(self.logits.clone(), self.rows, self.masks)

    def tokens(self) -> list[int]:
        tokens: list[int] = self.sample().tokens.tolist()
        return tokens


def read(sampler: Sampler, request_id: int, slot: int, first: int, ids: Sequence[int], floor: int = 0) -> None:
    """The model reads `ids` of a request from position `first` on."""
    nothing = torch.empty(0, dtype=torch.int64)
    positions = torch.arange(first, first + len(ids))
    half = Half((), positions, torch.full_like(positions, slot), nothing)
    pairs = Pairs(*[nothing] * 5)
    batch = Batch(torch.tensor(ids), half, half, nothing, nothing, nothing, pairs)
    sampler.read([Span(request_id, slot, first, len(ids), tuple(ids), 0, floor, 0, 0, True)], batch)


def masks_of(allowed: Sequence[set[int] | None], vocabulary: int) -> TokenMasks | None:
    rows = [place for place, tokens in enumerate(allowed) if tokens is not None]
    bits = np.zeros((len(rows), -(-vocabulary // 32) * 32), dtype=np.uint8)
    for row, place in enumerate(rows):
        bits[row, list(allowed[place] or ())] = 1
    packed = np.packbits(bits, axis=-1, bitorder="little").view(np.int32)
    return TokenMasks(torch.tensor(rows), torch.from_numpy(packed)) if rows else None


def noise(seed: int, vocabulary: int = 40, scale: float = 2.0) -> np.ndarray:
    """Logits that FP32 holds exactly."""
    return (np.random.default_rng(seed).standard_normal(vocabulary) * scale).astype(np.float32)


def shares(log_weights: Tensor) -> np.ndarray:
    return torch.softmax(log_weights.double(), -1).numpy()


def reference(row: Row) -> np.ndarray:
    ends = {EOS, *row.params.stop_token_ids} if not row.params.ignore_eos else {*row.params.stop_token_ids}
    return distribution(adjusted(row.logits, row.params, row.prompt, row.generated, ends, row.allowed), row.params)


class TestDistributions:
    """20,000 draws at fixed seeds against the reference's probabilities."""

    BIAS: ClassVar = {4: 2.5, 7: -3.0, 11: -math.inf}
    CASES: ClassVar[dict[str, dict[str, Any]]] = {
        "plain": {},
        "cold": {"temperature": 0.6},
        "hot": {"temperature": 1.9},
        "top_k": {"top_k": 7},
        "top_p": {"top_p": 0.7},
        "min_p": {"min_p": 0.15},
        "bias": {"logit_bias": BIAS},
        "repetition": {"repetition_penalty": 1.7},
        "frequency": {"frequency_penalty": 0.6},
        "presence": {"presence_penalty": 1.2},
        "negative penalties": {"presence_penalty": -0.7, "frequency_penalty": -0.4, "repetition_penalty": 0.8},
        "min_tokens": {"min_tokens": 9, "stop_token_ids": (5,)},
        "all": {
            "temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "logit_bias": BIAS, "presence_penalty": 0.3,
            "frequency_penalty": 0.2, "repetition_penalty": 1.2, "min_tokens": 9,
        },
    }  # fmt: skip

    @pytest.mark.parametrize("case", CASES)
    def test_draws_follow_the_reference(self, case: str) -> None:
        """Chi-square over the cells that expect 5 draws or more; the limit is exceeded once in 10,000."""
        draws = 20_000
        row = Row(noise(1), SamplingParams(**self.CASES[case]), seed=17, prompt=[2, 4, 4, 8], generated=[4, 6, 6, 6, 9])
        bench = Bench([row])
        weights = bench.adjust().expand(draws, -1)
        tokens = bench.sampler.draw(weights, [SampledRow(0, 0, 9 + position) for position in range(draws)])
        counts = np.bincount(tokens.numpy(), minlength=len(row.logits))
        expected = reference(row) * draws
        assert (counts[expected == 0] == 0).all()
        usual = expected >= 5
        observed = np.append(counts[usual], counts[~usual].sum())
        wanted = np.append(expected[usual], max(expected[~usual].sum(), 1e-9))
        chi = ((observed - wanted)[wanted > 1] ** 2 / wanted[wanted > 1]).sum()
        freedom = (wanted > 1).sum() - 1
        # Wilson and Hilferty's approximation of the quantile, 3.72 standard deviations.
        limit = freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3
        assert chi < limit

    @pytest.mark.parametrize("case", CASES)
    def test_the_log_weights_are_the_references(self, case: str) -> None:
        rows = [
            Row(noise(seed), SamplingParams(**self.CASES[case]), prompt=[2, 4, 4, 8], generated=[4, 6, 6, 6, 9])
            for seed in range(20)
        ]
        found = shares(Bench(rows).adjust())
        for place, row in enumerate(rows):
            np.testing.assert_allclose(found[place], reference(row), rtol=2e-5, atol=1e-12)


class TestOrder:
    """Each pair of steps that would give something else the other way round."""

    def check(self, row: Row, support: set[int]) -> np.ndarray:
        found = shares(Bench([row]).adjust())[0]
        assert set(np.flatnonzero(found)) == support
        np.testing.assert_allclose(found, reference(row), rtol=2e-5, atol=1e-12)
        return found

    def test_bias_comes_before_the_repetition_penalty(self) -> None:
        """-1 + 3 is positive, so it is divided: 2 / 2, not -1 * 2 + 3."""
        logits = np.array([-1.0, 1.0, 0.0, 0.0])
        row = Row(logits, SamplingParams(logit_bias={0: 3.0}, repetition_penalty=2.0), prompt=[0])
        found = self.check(row, {0, 1, 2, 3})
        assert found[0] == pytest.approx(found[1])

    def test_repetition_comes_before_frequency_and_presence(self) -> None:
        """2 / 2 - 1 - 0.5 = -0.5, not (2 - 1.5) / 2."""
        params = SamplingParams(repetition_penalty=2.0, frequency_penalty=1.0, presence_penalty=0.5)
        found = self.check(Row(np.array([2.0, -0.5]), params, generated=[0], prompt=[0]), {0, 1})
        assert found[0] == pytest.approx(found[1])

    def test_bias_comes_before_min_tokens(self) -> None:
        """However high a bias lifts an end, it does not come too early."""
        params = SamplingParams(logit_bias={EOS: 9.0}, min_tokens=2)
        self.check(Row(np.zeros(5), params, generated=[0]), {0, 1, 2, 4})
        assert self.check(Row(np.zeros(5), params, generated=[0, 0]), {0, 1, 2, EOS, 4})[EOS] > 0.99

    def test_penalties_come_before_min_tokens(self) -> None:
        """However much negative penalties lift an end, it does not come too early."""
        params = SamplingParams(stop_token_ids=[0], min_tokens=4, frequency_penalty=-2.0, repetition_penalty=0.5)
        logits = np.array([2.0, 0.0, 0.0, 0.0])
        self.check(Row(logits, params, generated=[0] * 3), {1, 2})
        assert self.check(Row(logits, params, generated=[0] * 4), {0, 1, 2, EOS})[0] > 0.99

    def test_min_tokens_comes_before_the_mask(self) -> None:
        """So an end is the last resort of what the grammar allows, not of everything."""
        params = SamplingParams(min_tokens=2)
        logits = np.array([0.0, 3.0, 1.0, 9.0])
        self.check(Row(logits, params, allowed={0, 2, EOS}), {0, 2})
        self.check(Row(logits, params, allowed={EOS}), {EOS})

    def test_min_tokens_comes_before_top_k(self) -> None:
        """An end that may not come takes no place among the most probable."""
        params = SamplingParams(min_tokens=2, top_k=2)
        self.check(Row(np.array([0.0, 3.0, 1.0, 9.0]), params), {1, 2})
        self.check(Row(np.array([0.0, 3.0, 1.0, 9.0]), params, generated=[0, 0]), {1, EOS})

    def test_min_tokens_comes_before_top_p_and_min_p(self) -> None:
        logits = np.log(np.array([0.03, 0.04, 0.03, 0.9]))
        for cut, kept in (({"top_p": 0.5}, {0, 1, 2}), ({"min_p": 0.9}, {1})):
            self.check(Row(logits, SamplingParams(min_tokens=1, **cut)), kept)
            self.check(Row(logits, SamplingParams(**cut)), {EOS})

    def test_penalties_come_before_the_temperature(self) -> None:
        """(1 - 1) / 2 = 0, not 1 / 2 - 1."""
        for penalty in ("frequency_penalty", "presence_penalty"):
            params = SamplingParams(temperature=2.0, **{penalty: 1.0})
            found = self.check(Row(np.array([1.0, 0.0]), params, generated=[0]), {0, 1})
            assert found[0] == pytest.approx(found[1])

    def test_frequency_counts_each_time_and_presence_once(self) -> None:
        """3 - 3 * 0.5 - 1 = 0.5."""
        params = SamplingParams(frequency_penalty=0.5, presence_penalty=1.0)
        found = self.check(Row(np.array([3.0, 0.5, 0.5]), params, generated=[0, 0, 0]), {0, 1, 2})
        assert found[0] == pytest.approx(found[1])

    @pytest.mark.parametrize(
        "penalty", [{"frequency_penalty": 1.0}, {"presence_penalty": 2.0}, {"repetition_penalty": 9.0}], ids=str
    )
    @pytest.mark.parametrize("cut", [{"top_k": 1}, {"top_p": 0.4}, {"min_p": 0.8}], ids=str)
    def test_penalties_come_before_the_cut(self, penalty: dict[str, float], cut: dict[str, float]) -> None:
        """The best token before penalties is not among what is kept after them."""
        row = Row(np.array([2.0, 1.0, 0.0, -1.0]), SamplingParams(**cut), prompt=[2], generated=[0, 0])
        self.check(row, {0})
        self.check(replace(row, params=SamplingParams(**cut, **penalty)), {1})

    def test_greedy_takes_the_best_after_bias_penalties_min_tokens_and_mask(self) -> None:
        """Before bias 4 is the best, before penalties 0, before min_tokens the end, before the mask 1; 2 it is."""
        params = SamplingParams(
            temperature=0, logit_bias={4: -9.0}, presence_penalty=2.0, frequency_penalty=2.0, min_tokens=5
        )
        row = Row(np.array([7.0, 5.0, 4.0, 6.0, 8.0]), params, generated=[0, 0], allowed={0, 2, 3, 4})
        assert Bench([row]).tokens() == [2]
        wanted = adjusted(row.logits, params, row.prompt, row.generated, {EOS}, row.allowed)
        assert wanted.argmax() == 2

    def test_masks_come_before_top_k(self) -> None:
        row = Row(np.array([5.0, 4.0, 3.0, 2.0, 1.0]), SamplingParams(top_k=2), allowed={2, 3, 4})
        self.check(row, {2, 3})

    def test_temperature_comes_before_top_p(self) -> None:
        """At temperature 1 the first token has 0.97 of the probability; at 4 it takes three for 0.8."""
        logits = np.array([6.0, 2.0, 1.0, 0.0])
        self.check(Row(logits, SamplingParams(top_p=0.8)), {0})
        self.check(Row(logits, SamplingParams(top_p=0.8, temperature=4.0)), {0, 1, 2})

    def test_temperature_comes_before_min_p(self) -> None:
        logits = np.array([2.0, 0.0, -2.0])
        self.check(Row(logits, SamplingParams(min_p=0.2)), {0})
        self.check(Row(logits, SamplingParams(min_p=0.2, temperature=2.0)), {0, 1})

    def test_top_p_is_of_what_top_k_keeps(self) -> None:
        """The first token has 0.4 of all four, but 0.57 of the first two."""
        logits = np.log(np.array([0.4, 0.3, 0.2, 0.1]))
        self.check(Row(logits, SamplingParams(top_p=0.5)), {0, 1})
        self.check(Row(logits, SamplingParams(top_p=0.5, top_k=2)), {0})

    def test_min_p_does_not_change_what_top_p_is_of(self) -> None:
        """0.6 of all takes a third token, which min_p then drops; 0.6 of what it keeps would take one."""
        logits = np.log(np.array([0.3, 0.21, 0.1, 0.1001, 0.1002, 0.1003, 0.0894]))
        self.check(Row(logits, SamplingParams(top_p=0.6)), {0, 1, 5})
        self.check(Row(logits, SamplingParams(top_p=0.6, min_p=0.5)), {0, 1})


class TestEdges:
    def one(self, logits: Sequence[float], seeds: int = 60, **fields: Any) -> set[int]:
        """The tokens that some seeds draw."""
        rows = [Row(np.array(logits), SamplingParams(**fields), seed) for seed in range(seeds)]
        return set(Bench(rows).tokens())

    @pytest.mark.parametrize("options", [{}, {"top_k": 2}, {"top_p": 0.1}, {"min_p": 1.0}, {"top_k": 1, "top_p": 0.0}])
    def test_temperature_0_takes_the_first_of_the_best_whatever_else_is_set(self, options: dict[str, Any]) -> None:
        assert self.one([1.0, 3.0, 2.0, 3.0], temperature=0, **options) == {1}

    def test_top_p_0_keeps_the_best_alone(self) -> None:
        assert self.one([1.0, 1.1, 1.05, 0.0], top_p=0.0) == {1}
        assert self.one([1.0, 1.1, 1.05, 0.0], top_p=1e-300) == {1}

    def test_top_p_1_and_top_k_beyond_the_vocabulary_keep_everything(self) -> None:
        for options in ({"top_p": 1.0}, {"top_k": 4}, {"top_k": 5}, {"top_k": 2**40}):
            assert self.one([1.0, 1.1, 1.05, 0.9], **options) == {0, 1, 2, 3}

    def test_top_p_just_below_1_keeps_all_that_counts(self) -> None:
        assert self.one([0.0] * 7, top_p=math.nextafter(1, 0)) == set(range(7))

    def test_all_but_one_banned(self) -> None:
        banned = {token: -math.inf for token in range(50) if token != 31}
        for options in ({}, {"temperature": 0}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}):
            fields: dict[str, Any] = {"logit_bias": banned, **options}
            assert self.one([float(token) for token in range(50)], seeds=3, **fields) == {31}

    def test_equal_logits_are_all_kept_or_the_first_taken(self) -> None:
        equal = [0.7] * 9
        assert self.one(equal, temperature=0) == {0}
        for options in ({}, {"top_k": 1}, {"top_p": 0.01}, {"min_p": 1.0}):
            assert self.one(equal, seeds=200, **options) == set(range(9))

    def test_nothing_allowed_gives_no_token_and_hurts_nobody(self) -> None:
        logits = noise(0)
        rows = [
            Row(logits, SamplingParams(temperature=1, top_p=0.5), allowed=set()),
            Row(logits, SamplingParams(temperature=0), allowed=set()),
            Row(np.full(40, np.nan), SamplingParams()),
            Row(np.full(40, np.nan), SamplingParams(temperature=0)),
            Row(logits, SamplingParams(temperature=0)),
        ]
        assert Bench(rows).tokens() == [-1, -1, -1, -1, int(logits.argmax())]

    def test_an_early_end_comes_only_where_nothing_else_is_allowed(self) -> None:
        logits = np.array([0.0, 0.0, 0.0, 50.0, 0.0])
        params = SamplingParams(min_tokens=2)
        assert Bench([Row(logits, params, generated=[0, 0])]).tokens() == [EOS]
        assert Bench([Row(logits, params, seed, generated=[0]) for seed in range(9)]).tokens() != [EOS] * 9
        assert Bench([Row(logits, params, generated=[0], allowed={EOS})]).tokens() == [EOS]
        assert Bench([Row(logits, replace(params, ignore_eos=True), generated=[0])]).tokens() == [EOS]

    @pytest.mark.parametrize("temperature", [1e-320, 1e-8, 1.0, 1e300], ids=str)
    def test_extreme_temperatures_stay_within_the_allowed_tokens(self, temperature: float) -> None:
        logits = [1e4, -1e4, -math.inf, 3e38] if temperature < 1 else [0.5, 0.2, -math.inf, 1.0]
        found = self.one(logits, temperature=temperature)
        assert found == ({3} if temperature < 1 else {0, 1, 3})

    def test_forbidden_tokens_never_come(self) -> None:
        logits = np.array([9.0, 9.0, 1.0, 1.0])
        rows = [Row(logits, SamplingParams(temperature=t), seed) for t in (0, 1, 50) for seed in range(20)]
        assert set(Bench(rows, forbidden=[0, 1]).tokens()) == {2, 3}


class TestMixes:
    """Rows of any requests in one batch: each gets, to the bit, what it gets alone."""

    VOCABULARY = 600
    LOGITS = st.integers(0, 2**32 - 1).flatmap(
        lambda seed: st.sampled_from([2.0, 0.3, 20.0]).map(lambda scale: noise(seed, TestMixes.VOCABULARY, scale))
    )
    TOKENS = st.lists(st.integers(0, VOCABULARY - 1), max_size=8)
    PARAMS = st.builds(
        SamplingParams,
        temperature=st.sampled_from([0, 0.5, 1, 1, 1.7]),
        top_k=st.sampled_from([0, 0, 1, 20, 599, 10**9]),
        top_p=st.sampled_from([1, 1, 0, 0.5, 0.9]),
        min_p=st.sampled_from([0, 0, 0.1]),
        presence_penalty=st.sampled_from([0, 0, 0.5]),
        frequency_penalty=st.sampled_from([0, -0.3]),
        repetition_penalty=st.sampled_from([1, 1, 1.3]),
        logit_bias=st.none() | st.dictionaries(st.integers(0, VOCABULARY - 1), st.floats(-3, 3), max_size=5),
        min_tokens=st.sampled_from([0, 4]),
        logprobs=st.sampled_from([None, 0, 3, 1000]),
    )
    ROWS = st.builds(
        Row,
        LOGITS,
        PARAMS,
        st.integers(0, 2**64 - 1),
        st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=5),
        TOKENS,
        st.none() | st.sets(st.integers(0, VOCABULARY - 1), min_size=1),
        st.integers(5, 2**40),
    )

    @settings(max_examples=40)
    @given(st.lists(ROWS, min_size=2, max_size=9))
    def test_a_row_does_not_see_its_neighbours(self, rows: list[Row]) -> None:
        together = Bench(rows)
        weights, sampled = together.adjust(), together.sample()
        logprobs = iter(sampled.logprobs.to_host() if sampled.logprobs is not None else [])
        for place, row in enumerate(rows):
            alone = Bench([row])
            assert torch.equal(alone.adjust()[0], weights[place])
            one = alone.sample()
            assert one.tokens[0] == sampled.tokens[place]
            assert (one.logprobs is None) == (place not in sampled.logprob_rows)
            if one.logprobs is not None:
                assert one.logprobs.to_host()[0] == next(logprobs)

    def test_an_end_that_comes_too_early_is_taken_where_a_grammar_allows_nothing_else(self) -> None:
        params = SamplingParams(temperature=0.5, top_p=0.9, min_tokens=4)
        row = Row(noise(0), params, 0, [0], [], {EOS}, None)
        found = shares(Bench([row]).adjust())[0]
        assert found[EOS] == 1
        np.testing.assert_array_equal(found, reference(row))

    @settings(max_examples=40)
    @given(st.lists(ROWS, min_size=1, max_size=5))
    def test_the_support_is_the_references(self, rows: list[Row]) -> None:
        """Up to tokens whose mass stands on the border of top_p or min_p, where FP32 and FP64 may differ."""
        rows = [replace(row, position=None) for row in rows]
        found = shares(Bench(rows).adjust())
        for place, row in enumerate(rows):
            if row.params.temperature:
                wanted = reference(row)
                differing = ((found[place] > 0) != (wanted > 0)) & (found[place] + wanted > 1e-9)
                assert differing.sum() <= 1
                if not differing.any():
                    np.testing.assert_allclose(found[place], wanted, rtol=2e-4, atol=1e-9)


class TestPenalties:
    """What counts as read: each request's own tokens, once, whatever its slot held and however it came to them."""

    def setup_method(self) -> None:
        self.sampler = Sampler(torch.zeros(20, dtype=torch.bool), 2, EOS)
        self.params = SamplingParams(frequency_penalty=1.0, presence_penalty=0.5)
        self.sampler.admit(0, Request(0, None, (5, 6), (), (), self.params, 0))

    def penalties(self, request_id: int = 0, slot: int = 0, drafts: Tensor | None = None) -> dict[int, float]:
        rows = [SampledRow(request_id, slot, 9)]
        found = self.sampler.adjust(torch.zeros(1, 20), rows, drafts=drafts)[0]
        found = found - found.max()
        return {token: -value for token, value in enumerate(found.tolist()) if value}

    def test_the_prompt_is_left_out(self) -> None:
        read(self.sampler, 0, 0, 0, [5, 6])
        assert self.penalties() == {}

    def test_tokens_count_each_time(self) -> None:
        read(self.sampler, 0, 0, 0, [5, 6])
        for position, token in enumerate([7, 5, 7], start=2):
            read(self.sampler, 0, 0, position, [token])
        assert self.penalties() == {7: 2.5, 5: 1.5}

    def test_a_request_that_begins_again_elsewhere_is_counted_from_what_it_reads(self) -> None:
        read(self.sampler, 0, 0, 0, [5, 6])
        read(self.sampler, 0, 0, 2, [7])
        read(self.sampler, 0, 1, 0, [5])
        read(self.sampler, 0, 1, 1, [6, 7, 8])
        assert self.penalties(slot=1) == {7: 1.5, 8: 1.5}

    def test_a_request_that_begins_behind_a_cached_prefix_counts_its_own_tokens(self) -> None:
        read(self.sampler, 0, 0, 1, [6, 9], floor=1)
        assert self.penalties() == {9: 1.5}

    def test_the_next_request_in_a_slot_inherits_nothing(self) -> None:
        read(self.sampler, 0, 0, 0, [5, 6, 7])
        self.sampler.admit(1, Request(0, None, (5,), (), (), self.params, 0))
        read(self.sampler, 1, 0, 0, [5])
        assert self.penalties(1) == {}
        self.sampler.admit(2, Request(0, None, (5,), (), (), SamplingParams(), 0))
        read(self.sampler, 2, 0, 0, [5, 7, 7])
        read(self.sampler, 0, 1, 0, [5, 6, 8])
        assert self.penalties(2) == {}
        assert self.penalties(0, 1) == {8: 1.5}

    def test_drafts_count_in_their_row_alone(self) -> None:
        read(self.sampler, 0, 0, 0, [5, 6, 7])
        assert self.penalties(drafts=torch.tensor([[7, 8, -1]])) == {7: 2.5, 8: 1.5}
        assert self.penalties() == {7: 1.5}

    def test_repetition_counts_the_prompt_too(self) -> None:
        params = SamplingParams(repetition_penalty=2.0)
        self.sampler.admit(1, Request(0, None, (5, 6), (), (), params, 0))
        read(self.sampler, 1, 0, 0, [5, 6, 7])
        found = self.sampler.adjust(torch.ones(1, 20), [SampledRow(1, 0, 3)])[0]
        assert set(np.flatnonzero(found.numpy() < 0)) == {5, 6, 7}

    def test_nothing_is_allocated_until_a_request_asks(self) -> None:
        assert self.sampler._penalties is None
        self.sampler.admit(1, Request(0, None, (5, 6), (), (), SamplingParams(), 0))
        read(self.sampler, 1, 0, 0, [5, 6, 7])
        assert self.sampler._penalties is None

    def test_a_row_that_was_never_read_is_refused(self) -> None:
        with pytest.raises(ValueError, match="before `read`"):
            self.penalties()


class TestMasks:
    def test_the_sign_bit_is_a_token_like_any_other(self) -> None:
        masks = TokenMasks(torch.tensor([0]), torch.tensor([[-(2**31), 0]], dtype=torch.int32))
        bench = Bench([Row(np.zeros(40), SamplingParams())])
        bench.masks = masks
        assert bench.tokens() == [31]


class TestLogprobs:
    def test_they_are_the_models_own(self) -> None:
        """Neither temperature nor bias, penalty, mask or cut-off changes them; forbidden tokens have no part."""
        params = SamplingParams(
            temperature=0.3, top_k=2, logit_bias={0: 5.0}, presence_penalty=1.0, logprobs=4, min_p=0.5
        )
        logits = noise(3)
        row = Row(logits, params, generated=[1, 2], allowed=set(range(20)))
        sampled = Bench([row, Row(logits, SamplingParams())], forbidden=[39, 38]).sample()
        assert sampled.logprob_rows == (0,)
        assert sampled.logprobs is not None
        (found,) = sampled.logprobs.to_host()
        wanted = torch.log_softmax(torch.tensor(logits[:38], dtype=torch.float64), -1)
        assert found.logprob == pytest.approx(wanted[sampled.tokens[0]].item(), abs=1e-6)
        assert list(found.top) == wanted.argsort(descending=True)[:4].tolist()
        for token, value in found.top.items():
            assert value == pytest.approx(wanted[token].item(), abs=1e-6)

    def test_each_row_gets_as_many_as_it_asked_for(self) -> None:
        rows = [Row(noise(n), SamplingParams(logprobs=count)) for n, count in enumerate([0, None, 3, 1000])]
        sampled = Bench(rows, forbidden=[5]).sample()
        assert sampled.logprob_rows == (0, 2, 3)
        assert sampled.logprobs is not None
        assert [len(one.top) for one in sampled.logprobs.to_host()] == [0, 3, 39]

    def test_of_equal_tokens_the_first_are_listed(self) -> None:
        sampled = Bench([Row(np.zeros(700), SamplingParams(logprobs=5))]).sample()
        assert sampled.logprobs is not None
        (found,) = sampled.logprobs.to_host()
        assert list(found.top) == [0, 1, 2, 3, 4]
        assert found.logprob == pytest.approx(-math.log(700))
