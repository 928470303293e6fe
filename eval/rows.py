"""From replies and scores to rows of the table; the bounds are those the checkpoint was trained to reach."""

from collections.abc import Mapping, Sequence

from deepinfer.speculative.calibration import Calibration, Observations, errors
from deepinfer.speculative.rounds import Round, mean_accepted_length
from eval.english import TextScore
from eval.replies import Reply
from eval.table import Row

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


def task_row(task: str, replies: Sequence[Reply]) -> Row:
    """Accuracy on one task."""
    name, bound = TASKS[task]
    right = sum(reply.correct for reply in replies)
    return Row(task, name, right / len(replies), bound, percent=True, note=f"{right} of {len(replies)}")


def english_row(score: TextScore) -> Row:
    """Bits per byte of English."""
    note = f"{score.bytes} bytes, {score.tokens} tokens, perplexity {score.perplexity:.2f} a token"
    return Row("bits_per_byte", "English text, bits per byte", score.bits_per_byte, BITS_PER_BYTE, False, note=note)


def draft_rows(rounds: Mapping[str, Sequence[Round]], calibration: Calibration) -> list[Row]:
    """Accepted length and calibration over all tasks' rounds; none where no reply was long enough for a round."""
    pooled = [round_ for found in rounds.values() for round_ in found]
    if not pooled:
        return []
    by_task = ", ".join(f"{task} {mean_accepted_length(found):.2f}" for task, found in rounds.items() if found)
    seen = Observations.of(pooled)
    found = errors(seen, calibration.temperatures)
    raw = errors(seen, Calibration.identity(len(calibration.temperatures)).temperatures)
    by_position = ", ".join(f"{error:.3f}" for error in found.ece_by_position)
    how = "calibrated" if calibration.samples else "NOT calibrated"
    return [
        Row(
            "accepted_length",
            "DSpark, mean accepted length with the bonus token",
            mean_accepted_length(pooled),
            ACCEPTED_LENGTH,
            note=f"{len(pooled)} rounds; {by_task}",
        ),
        Row(
            "calibration_error",
            f"DSpark confidence, {how}: calibration error",
            found.ece,
            CALIBRATION_ERROR,
            at_least=False,
            note=f"by position {by_position}; uncalibrated {raw.ece:.3f}; Brier score {found.brier:.3f}",
        ),
    ]
