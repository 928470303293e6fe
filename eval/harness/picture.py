"""Draws accuracy against the tokens that were spent on it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.harness.errors import EvalError
from eval.harness.rollouts import Key, Rollout
from eval.harness.verdicts import Verdict

_COLOURS = {"rule": "#1f5fa8", "math": "#2d8a4e", "llm": "#c8581a"}


def budget_curve(rollouts: Mapping[Key, Rollout], verdicts: Mapping[Key, Verdict]) -> list[tuple[int, float]]:
    """(tokens, share) in the order of tokens: the share of judged samples that are right and took no more tokens.

    It is the Pass@1 that a limit of so many tokens would have left, since a sample that is cut off is not right.
    """
    judged = [key for key, verdict in verdicts.items() if verdict.correct is not None]
    points: dict[int, float] = {}
    right = 0
    for key in sorted(judged, key=lambda key: rollouts[key].completion_tokens):
        right += bool(verdicts[key].correct)
        points[rollouts[key].completion_tokens] = right / len(judged)
    return list(points.items())


def question_points(rollouts: Mapping[Key, Rollout], verdicts: Mapping[Key, Verdict]) -> list[tuple[float, float]]:
    """(mean tokens, share of right samples) of each question."""
    samples: dict[str, list[tuple[int, bool]]] = {}
    for key, verdict in verdicts.items():
        if verdict.correct is not None:
            samples.setdefault(key[0], []).append((rollouts[key].completion_tokens, verdict.correct))
    return [
        (sum(tokens for tokens, _ in found) / len(found), sum(right for _, right in found) / len(found))
        for found in samples.values()
    ]


def draw(
    path: Path, summary: Mapping[str, Any], rollouts: Mapping[Key, Rollout], modes: Mapping[str, Mapping[Key, Verdict]]
) -> None:
    """Write the picture; EvalError where matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise EvalError("the picture needs matplotlib; install it: pip install 'deepinfer[eval]'") from None
    figure = Figure(figsize=(7.2, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for name, verdicts in modes.items():
        _draw_judge(axes, name, budget_curve(rollouts, verdicts))
    _draw_questions(axes, question_points(rollouts, modes[summary["judge"]]))
    _label(axes, summary)
    figure.savefig(path, dpi=150)


def _draw_judge(axes: Any, name: str, curve: Sequence[tuple[int, float]]) -> None:
    if not curve:
        return
    tokens, shares = ([0, *(t for t, _ in curve)], [0.0, *(s for _, s in curve)])
    style = {"color": _COLOURS[name], "linewidth": 2, "linestyle": "--" if name == "llm" else "-"}
    axes.step(tokens, shares, where="post", label=f"judge {name}: {100 * shares[-1]:.1f}%", **style)


def _draw_questions(axes: Any, points: Sequence[tuple[float, float]]) -> None:
    if points:
        axes.scatter(*zip(*points, strict=True), s=24, color="#888888", alpha=0.6, zorder=3, label="one question")


def _label(axes: Any, summary: Mapping[str, Any]) -> None:
    state = "" if summary["coverage_complete"] else " (not complete)"
    axes.set_title(f"{summary['set']}: right within so many tokens{state}")
    axes.set_xlabel("tokens of a sample, reasoning included")
    axes.set_ylabel("share of samples")
    axes.set_ylim(-0.03, 1.05)
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="best")
