"""A row that differs is excused as a rounding tie only when it is shown to be one."""

import sys
from pathlib import Path

import golden_files
import pytest
import torch
from random_models import NO_ENGRAM, tiny
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import check_golden
from golden_check import target, ties
from golden_check.compare import Group, errors, failing
from golden_check.data import Golden
from golden_check.ties import NEAR, Nudge, explain, near_ties, other_side, run_nudged

from deepinfer.checkpoint.formats import window_fp8
from deepinfer.reference import attention

TEXT = f"text{max(golden_files.LENGTHS)}"
# All positive E4M3 values, and zero.
CODES = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    golden_files.write(tmp_path, tiny(**NO_ENGRAM))
    return tmp_path


@pytest.fixture
def group(directory: Path) -> Group:
    """The longest prompt of a random model."""
    (found,) = (group for group in target.text(Golden(directory)) if group.case == f"text {TEXT}")
    return found


def moves(group: Group, nudges: list[Nudge]) -> set[tuple[str, int]]:
    """Rows that fail when the golden data rounded these values the other way."""
    return failing(group, errors(group, run_nudged(group, nudges)))


def telling(group: Group) -> list[Nudge]:
    """Values near a boundary whose rounding decides over rows."""
    found = [nudge for nudge in near_ties(group) if moves(group, [nudge])]
    assert len(found) > 3
    return found


def expect(directory: Path, values: dict[str, Tensor]) -> None:
    """Make these the expected values of the prompt."""

    def change(tensors: dict[str, Tensor]) -> None:
        tensors.update({f"{TEXT}.{what}": value for what, value in values.items()})

    golden_files.edit(directory / "text_fp32.safetensors", change)


def results(directory: Path) -> list[tuple[bool, str]]:
    """Whether each tensor of the prompt passes, and why."""
    report = check_golden.check(directory)
    return [(result.ok, result.tie) for result in report.results if result.case == f"text {TEXT}"]


class TestOtherSide:
    def test_is_the_next_code_across_the_boundary(self) -> None:
        x = torch.randn(20, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 3, 20)[:, None]
        rounded = window_fp8(x)
        other, distance = other_side(x, rounded)
        for row in range(20):
            for channel in range(64):
                if torch.isinf(distance[row, channel]):
                    continue
                block = x[row, channel // 32 * 32 :][:32]
                amax = max(block.abs().max().item(), 1e-4)
                scale = 2.0 ** torch.tensor(amax / 448).log2().ceil().item()
                value, codes = abs(x[row, channel].item()) / scale, CODES.tolist()
                around = [max(c for c in codes if c <= value), min(c for c in codes if c >= value)]
                nearest = min(around, key=lambda code: abs(code - value))
                assert abs(rounded[row, channel].item()) / scale == nearest
                assert abs(other[row, channel].item()) / scale == sum(around) - nearest
                gap = abs(value - sum(around) / 2) * scale / block.square().mean().sqrt().item()
                assert distance[row, channel].item() == pytest.approx(gap, abs=1e-6)

    def test_keeps_the_sign_and_leaves_exact_values(self) -> None:
        x = torch.tensor([448.0, -1.0624, 0.5, *[0.0] * 29])
        other, distance = other_side(x, window_fp8(x))
        assert other[1].item() == -1.125
        assert distance[[0, 2, 3]].isinf().all()
        assert distance[1].item() == pytest.approx(1e-4 / x.square().mean().sqrt().item(), rel=1e-2)


class TestTies:
    def test_one_is_shown(self, directory: Path, group: Group) -> None:
        """The golden data rounds one value to its other side: all rows from there on differ, by up to a tenth."""
        for nudge in telling(group)[:3]:
            expect(directory, dict(run_nudged(group, [nudge])))
            for ok, tie in results(directory):
                assert ok
                assert str(nudge) in tie or not tie
            assert any(tie for _, tie in results(directory))

    def test_two_of_one_prompt_are_shown(self, directory: Path, group: Group) -> None:
        nudges = telling(group)
        first = min(nudges, key=lambda nudge: min(row for _, row in moves(group, [nudge])))
        second = next(n for n in nudges if n.row > first.row and moves(group, [first, n]) > moves(group, [first]))
        expect(directory, dict(run_nudged(group, [first, second])))
        found = results(directory)
        assert all(ok for ok, _ in found)
        assert any(str(first) in tie for _, tie in found)

    def test_the_run_is_as_before_afterwards(self, group: Group) -> None:
        original = attention.window_fp8
        before = group.run()["logits"]
        run_nudged(group, telling(group)[:1])
        assert attention.window_fp8 is original
        assert torch.equal(group.run()["logits"], before)


class TestNoExcuse:
    def test_a_value_far_from_its_boundary(
        self, directory: Path, group: Group, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as wider:
            wider.setattr(ties, "NEAR", 1e-2)
            far = [nudge for nudge in near_ties(group) if nudge.distance > 100 * NEAR]
        nudge = next(nudge for nudge in far if moves(group, [nudge]))
        expect(directory, dict(run_nudged(group, [nudge])))
        assert not all(ok for ok, _ in results(directory))
        assert not any(tie for _, tie in results(directory))

    def test_a_row_that_is_wrong(self, directory: Path, group: Group) -> None:
        values = dict(group.run())
        values["logits"][20] *= 1.01
        expect(directory, values)
        assert results(directory) == [(False, ""), (True, "")]

    def test_a_tie_does_not_hide_a_wrong_row(self, directory: Path, group: Group) -> None:
        nudge = telling(group)[0]
        values = dict(run_nudged(group, [nudge]))
        values["logits"][-1] *= 1.01
        expect(directory, values)
        assert not all(ok for ok, _ in results(directory))
        assert not any(tie for _, tie in results(directory))

    def test_without_values_near_a_boundary_nothing_is_explained(self, group: Group) -> None:
        assert explain(Group("x", {}, lambda: {}), {("logits", 3)}) == ""
