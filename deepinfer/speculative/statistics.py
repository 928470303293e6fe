"""What speculation has gained: accepted lengths, acceptance by place, how right confidence was, what drafting took."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from deepinfer.speculative.calibration import BINS


@dataclass
class SpeculationStatistics:
    """Counts since the engine was made; the runner changes them.

    rounds: rows of newest tokens that were run. tokens: what they gave. verified, accepted: drafts, by their place in a
    block. chances, events, members: of the drafts whose survival fell into each of equal intervals, the sum of
    survival, how many were accepted with all before them, and their number. drafting, running: seconds of drafting, and
    of steps.
    """

    rounds: int = 0
    tokens: int = 0
    verified: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=lambda: [0.0] * BINS)
    events: list[int] = field(default_factory=lambda: [0] * BINS)
    members: list[int] = field(default_factory=lambda: [0] * BINS)
    drafting: float = 0.0
    running: float = 0.0

    def count(self, verified: int, accepted: int, survival: Sequence[float]) -> None:
        """Take note of one request's round: of `verified` drafts with these chances the first `accepted` were right."""
        self.rounds += 1
        self.tokens += 1 + accepted
        missing = verified - len(self.verified)
        self.verified += [0] * missing
        self.accepted += [0] * missing
        for place in range(verified):
            right, bin_ = place < accepted, min(int(survival[place] * BINS), BINS - 1)
            self.verified[place] += 1
            self.accepted[place] += right
            self.chances[bin_] += survival[place]
            self.events[bin_] += right
            self.members[bin_] += 1

    def add(self, other: "SpeculationStatistics") -> None:
        """Add what another engine has counted."""
        for name, value in vars(other).items():
            mine = getattr(self, name)
            if isinstance(value, list):
                mine += [0] * (len(value) - len(mine))
                for place, number in enumerate(value):
                    mine[place] += number
            else:
                setattr(self, name, mine + value)

    @property
    def accepted_length(self) -> float:
        """Mean tokens of a round, the target's own included; 0 before the first."""
        return self.tokens / self.rounds if self.rounds else 0.0

    @property
    def calibration_error(self) -> float:
        """Mean gap between stated and observed chance (ECE) of the drafts verified; 0 if there were none."""
        gaps = (abs(chance - event) for chance, event in zip(self.chances, self.events, strict=True))
        return sum(gaps) / max(1, sum(self.members))

    def lines(self) -> list[str]:
        """A report for people; empty if nothing was verified."""
        if not sum(self.verified):
            return []
        shares = " ".join(f"{a / v:.0%}" for a, v in zip(self.accepted, self.verified, strict=True) if v)
        share = self.drafting / self.running if self.running else 0.0
        return [
            f"drafts     {sum(self.accepted)} of {sum(self.verified)} accepted (by place {shares}), "
            f"{self.accepted_length:.2f} tokens a round; confidence off by {self.calibration_error:.1%}; "
            f"{share:.0%} of the time"
        ]
