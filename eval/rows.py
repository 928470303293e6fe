"""From replies and scores to rows of the table; the bounds are those the checkpoint was trained to reach."""

from collections.abc import Mapping, Sequence

from deepinfer.speculative.calibration import Calibration, Observations, errors
from deepinfer.speculative.rounds import mean_accepted_length
from eval.english import TextScore
from eval.replies import Reply
from eval.table import Row
from eval.target import Replay

TASKS = {
    "add2": ("two-digit addition and subtraction", 0.95),
    "add3": ("three-digit addition", 0.80),
    "json": ("a sentence to JSON, exact", 0.90),
    "passkey": ("a passkey stated 2,000 to 4,000 tokens before", 0.90),
    "image": ("a number of 1 to 4 digits in an image", 0.90),
}
BITS_PER_BYTE = 2.0
ACCEPTED_LENGTH = 2.5
CALIBRATION_ERROR = 0.05
AGREEMENT = 0.98
"""Not a trait of the checkpoint but of the engine: what is left are near ties, rounded otherwise."""


def task_row(task: str, replies: Sequence[Reply]) -> Row:
    """Accuracy on one task."""
    name, bound = TASKS[task]
    right = sum(reply.correct for reply in replies)
    return Row(task, name, right / len(replies), bound, percent=True, note=f"{right} of {len(replies)}")


def english_row(score: TextScore) -> Row:
    """Bits per byte of English."""
    note = f"{score.bytes} bytes, {score.tokens} tokens, perplexity {score.perplexity:.2f} a token"
    return Row("bits_per_byte", "English text, bits per byte", score.bits_per_byte, BITS_PER_BYTE, False, note=note)


def draft_rows(replays: Mapping[str, Sequence[Replay]], calibration: Calibration) -> list[Row]:
    """Accepted length and calibration over the rounds of all tasks; none where nothing was drafted."""
    by_task = {task: [round_ for replay in found for round_ in replay.rounds] for task, found in replays.items()}
    pooled = [round_ for rounds in by_task.values() for round_ in rounds]
    if not pooled:
        return []
    lengths = ", ".join(f"{task} {mean_accepted_length(rounds):.2f}" for task, rounds in by_task.items() if rounds)
    seen = Observations.of(pooled)
    found = errors(seen, calibration.temperatures)
    raw = errors(seen, Calibration.identity(len(calibration.temperatures)).temperatures)
    positions = ", ".join(f"{error:.3f}" for error in found.ece_by_position)
    how = "calibrated" if calibration.samples else "NOT calibrated"
    return [
        Row(
            "accepted_length",
            "DSpark, mean accepted length with the bonus token",
            mean_accepted_length(pooled),
            ACCEPTED_LENGTH,
            note=f"{len(pooled)} rounds; {lengths}",
        ),
        Row(
            "calibration_error",
            f"DSpark confidence, {how}: calibration error",
            found.ece,
            CALIBRATION_ERROR,
            at_least=False,
            note=f"by position {positions}; uncalibrated {raw.ece:.3f}; Brier score {found.brier:.3f}",
        ),
    ]


def agreement_row(replays: Mapping[str, Sequence[Replay]]) -> Row:
    """How much of the engine's replies the reference model would have said, too."""
    every = [replay for found in replays.values() for replay in found]
    tokens, differing = sum(replay.tokens for replay in every), sum(replay.differing for replay in every)
    name = "reply tokens that the reference model confirms"
    return Row(
        "agreement", name, 1 - differing / tokens, AGREEMENT, percent=True, note=f"{tokens - differing} of {tokens}"
    )
