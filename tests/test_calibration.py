"""Survival, calibration error and the fit of temperatures, against plain loops and data of known temperatures."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from deepinfer.speculative.calibration import (
    BINS,
    TEMPERATURES,
    Observations,
    brier_score,
    errors,
    expected_calibration_error,
    fit_temperatures,
    survival,
)
from deepinfer.speculative.rounds import Round

PAIRS = st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=60)


def columns(pairs: list[tuple[float, bool]]) -> tuple[Tensor, Tensor]:
    return torch.tensor([p for p, _ in pairs], dtype=torch.float64), torch.tensor([e for _, e in pairs])


def simulated(count: int, truth: list[float], seed: int = 0) -> Observations:
    """Drafts that are accepted with the chance that their logit, divided by the true temperature, says."""
    generator = torch.Generator().manual_seed(seed)
    logits = 1 + 2 * torch.randn(count, len(truth), generator=generator, dtype=torch.float64)
    chance = torch.sigmoid(logits / torch.tensor(truth))
    accepted = torch.rand(logits.shape, generator=generator) < chance
    return Observations(logits, accepted.long().cumprod(-1).bool(), torch.ones_like(accepted))


class TestSurvival:
    def test_is_the_product_of_scaled_sigmoids(self) -> None:
        found = survival(torch.tensor([0.0, 2.0, -1.0]), [1, 2, 0.5])
        first, second, third = 0.5, 1 / (1 + math.exp(-1)), 1 / (1 + math.exp(2))
        torch.testing.assert_close(found, torch.tensor([first, first * second, first * second * third]))

    @given(logits=st.lists(st.floats(-50, 50), min_size=1, max_size=8), temperature=st.floats(0.25, 4))
    def test_never_increases_and_stays_a_probability(self, logits: list[float], temperature: float) -> None:
        found = survival(torch.tensor(logits), [temperature] * len(logits)).tolist()
        assert all(0 <= p <= 1 for p in found)
        assert found == sorted(found, reverse=True)

    @given(low=st.floats(-4, 4), gap=st.floats(0.1, 4), temperature=st.floats(0.5, 4))
    def test_keeps_the_order_within_a_position(self, low: float, gap: float, temperature: float) -> None:
        found = survival(torch.tensor([[low], [low + gap]], dtype=torch.float64), [temperature])
        assert found[0] < found[1]


class TestCalibrationError:
    @given(PAIRS)
    def test_agrees_with_a_plain_loop(self, pairs: list[tuple[float, bool]]) -> None:
        expected = 0.0
        for number in range(BINS):
            inside = [(p, e) for p, e in pairs if min(int(p * BINS), BINS - 1) == number]
            if inside:
                stated = sum(p for p, _ in inside) / len(inside)
                observed = sum(e for _, e in inside) / len(inside)
                expected += len(inside) / len(pairs) * abs(stated - observed)
        assert expected_calibration_error(*columns(pairs)) == pytest.approx(expected, abs=1e-12)

    def test_by_hand(self) -> None:
        # Bin 0.9..0.95: stated 0.91, half of them happen; bin 0.1..0.15: stated 0.12, none happens.
        pairs = [(0.90, True), (0.92, False), (0.12, False), (0.12, False)]
        assert expected_calibration_error(*columns(pairs)) == pytest.approx(0.5 * 0.41 + 0.5 * 0.12)

    def test_certainty_counts_in_the_last_bin(self) -> None:
        assert expected_calibration_error(*columns([(1.0, True), (0.96, False)])) == pytest.approx(0.96 / 2)

    def test_of_nothing_is_nothing(self) -> None:
        empty = torch.tensor([])
        assert expected_calibration_error(empty, empty.bool()) == brier_score(empty, empty.bool()) == 0

    def test_of_true_probabilities_goes_to_zero(self) -> None:
        seen = simulated(40_000, [1.0, 1.0, 1.0])
        assert errors(seen, [1.0] * 3).ece < 0.01
        assert errors(seen, [0.25] * 3).ece > 0.05

    @given(PAIRS)
    def test_brier_score(self, pairs: list[tuple[float, bool]]) -> None:
        expected = sum((p - e) ** 2 for p, e in pairs) / len(pairs)
        assert brier_score(*columns(pairs)) == pytest.approx(expected)


class TestObservations:
    rounds = (
        Round(position=10, accepted=2, judged=3, emitted=3, confidence=(1.0, 2.0, 3.0)),
        Round(position=13, accepted=1, judged=1, emitted=1, confidence=(4.0, 5.0, 6.0)),
    )

    def test_events_and_what_is_known(self) -> None:
        seen = Observations.of(self.rounds)
        assert seen.logits.tolist() == [[1, 2, 3], [4, 5, 6]]
        assert seen.events.tolist() == [[True, True, False], [True, False, False]]
        assert seen.known.tolist() == [[True, True, True], [True, False, False]]

    def test_what_lies_beyond_the_end_does_not_count(self) -> None:
        seen = Observations.of(self.rounds)
        other = Observations(seen.logits.where(seen.known, torch.tensor(-9.0)), seen.events | ~seen.known, seen.known)
        assert errors(other, [1, 1, 1]) == errors(seen, [1, 1, 1])
        assert fit_temperatures(other) == fit_temperatures(seen)

    def test_pooled_error_weighs_positions_by_their_rounds(self) -> None:
        logits = torch.zeros(4, 2, dtype=torch.float64)  # survival 0.5 and 0.25: bins of their own
        known = torch.tensor([[True, False]] * 3 + [[True, True]])
        seen = Observations(logits, torch.tensor([[True, True]] * 4) & known, known)
        found = errors(seen, [1, 1])
        assert found.ece_by_position == pytest.approx((0.5, 0.75))
        assert found.ece == pytest.approx((4 * 0.5 + 0.75) / 5)
        assert found.brier == pytest.approx((4 * 0.25 + 0.75**2) / 5)


class TestFit:
    truth = (0.5, 1.0, 2.5)

    def test_finds_the_temperatures_that_made_the_data(self) -> None:
        fitted = fit_temperatures(simulated(30_000, list(self.truth)))
        for found, true in zip(fitted, self.truth, strict=True):
            assert found == pytest.approx(true, rel=0.25)

    def test_helps_on_data_it_has_not_seen(self) -> None:
        fitted = fit_temperatures(simulated(10_000, list(self.truth), seed=1))
        fresh = simulated(10_000, list(self.truth), seed=2)
        assert errors(fresh, fitted).ece < 0.02 < errors(fresh, [1, 1, 1]).ece

    def test_no_candidate_is_better_given_those_before(self) -> None:
        seen = simulated(500, list(self.truth))
        fitted = fit_temperatures(seen)
        for position in range(3):
            found = errors(seen, fitted).ece_by_position[position]
            others = [[*fitted[:position], float(t), *fitted[position + 1 :]] for t in TEMPERATURES]
            assert found <= min(errors(seen, other).ece_by_position[position] for other in others) + 1e-12

    def test_later_positions_do_not_move_earlier_ones(self) -> None:
        seen = simulated(500, list(self.truth))
        shorter = Observations(seen.logits[:, :2], seen.events[:, :2], seen.known[:, :2])
        assert fit_temperatures(shorter) == fit_temperatures(seen)[:2]

    def test_an_unseen_position_keeps_its_confidence(self) -> None:
        seen = simulated(500, list(self.truth))
        known = seen.known.clone()
        known[:, 2] = False
        assert fit_temperatures(Observations(seen.logits, seen.events, known))[2] == pytest.approx(1)

    def test_candidates_are_spread_evenly_on_a_log_scale(self) -> None:
        assert (float(TEMPERATURES[0]), float(TEMPERATURES[-1])) == pytest.approx((0.25, 4))
        steps = TEMPERATURES.log().diff()
        torch.testing.assert_close(steps, steps[:1].expand_as(steps))
