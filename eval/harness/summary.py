"""What a scored run amounts to: summary.json, and the same as a table."""

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from eval.harness.benchmarks import BENCHMARKS
from eval.harness.rollouts import Key, Rollout
from eval.harness.statistics import agreement, by_question, pass_at_1
from eval.harness.verdicts import Verdict

Verdicts = Mapping[Key, Verdict]


def summarise(
    record: Mapping[str, Any],
    questions: Sequence[str],
    rollouts: Mapping[Key, Rollout],
    repeated: int,
    modes: Mapping[str, Verdicts],
    mode: str,
) -> dict[str, Any]:
    """The summary of a run for the judge `mode`, and beside it that of every judge that ran before."""
    expected = [(question, sample) for question in questions for sample in range(record["samples"])]
    per_mode = {name: _judged(expected, rollouts, verdicts) for name, verdicts in modes.items()}
    return {
        "benchmark": record["benchmark"],
        "set": name_set(record),
        "judge": mode,
        **per_mode[mode],
        **_generated(record, expected, rollouts),
        "repeated_samples": repeated,
        "reference": _reference(record),
        "judges": per_mode,
        "agreement": {f"{a} and {b}": agreement(modes[a], modes[b]) for a, b in combinations(sorted(modes), 2)},
        "run": {name: record[name] for name in ("checkpoint", "engine", "data", "sampling", "seed")},
    }


def _reference(record: Mapping[str, Any]) -> float | None:
    """What the released weights reach on the whole set; it says nothing about another one."""
    return BENCHMARKS[record["benchmark"]].reference if record["data"]["extent"] == "whole" else None


def name_set(record: Mapping[str, Any]) -> str:
    """The benchmark, or what stands for it in this run."""
    title = BENCHMARKS[record["benchmark"]].title
    names = {"whole": title, "part": f"{title} (a part)", "sample": f"sample set in the form of {title}"}
    return names[record["data"]["extent"]]


def _generated(record: Mapping[str, Any], expected: Sequence[Key], rollouts: Mapping[Key, Rollout]) -> dict[str, Any]:
    there = [rollouts[key] for key in expected if key in rollouts]
    good = [rollout for rollout in there if not rollout.failed]
    tokens = sum(rollout.completion_tokens for rollout in good)
    return {
        "questions": record["data"]["questions"],
        "samples_per_question": record["samples"],
        "samples": len(expected),
        "generated": len(good),
        "truncated": sum(rollout.finish_reason == "length" for rollout in good),
        "failed": len(there) - len(good),
        "completion_tokens": tokens,
        "mean_completion_tokens": tokens / len(good) if good else None,
    }


def _judged(expected: Sequence[Key], rollouts: Mapping[Key, Rollout], verdicts: Verdicts) -> dict[str, Any]:
    """Pass@1 of one judge; null unless every question has all its samples, generated and judged."""
    judged = {
        key: verdicts[key]
        for key in expected
        if key in verdicts and verdicts[key].correct is not None and key in rollouts and not rollouts[key].failed
    }
    complete = bool(expected) and len(judged) == len(expected)
    estimate = pass_at_1(by_question(judged)) if complete else None
    return {
        "coverage_complete": complete,
        "pass_at_1": estimate.value if estimate else None,
        "standard_error": _number(estimate.standard_error) if estimate else None,
        "interval_95": [estimate.low, estimate.high] if estimate else None,
        "judged": len(judged),
        "correct": sum(bool(verdict.correct) for verdict in judged.values()),
        "without_answer": sum(verdict.extracted is None for verdict in judged.values()),
    }


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value


def show(summary: Mapping[str, Any]) -> str:
    """The summary for people, in Markdown."""
    lines = [
        f"{summary['set']}: {summary['questions']} questions, {summary['samples_per_question']} samples of each",
        "",
        "| judge | Pass@1 | standard error | 95% interval | right | judged | without answer |",
        "|---|---|---|---|---|---|---|",
        *(_row(name, judged, summary["samples"]) for name, judged in summary["judges"].items()),
        "",
        f"generated {summary['generated']} of {summary['samples']} samples, {summary['truncated']} truncated, "
        f"{summary['failed']} failed; {_mean(summary)} tokens a sample",
    ]
    lines += [_agreement(pair, found) for pair, found in summary["agreement"].items()]
    if not summary["coverage_complete"]:
        lines.append("coverage is not complete: there is no Pass@1 until every sample is generated and judged")
    return "\n".join(lines)


def _row(name: str, judged: Mapping[str, Any], samples: int) -> str:
    value, error, interval = (judged[key] for key in ("pass_at_1", "standard_error", "interval_95"))
    numbers = ["-", "-", "-"]
    if value is not None:
        low, high = interval
        numbers = [_percent(value), "-" if error is None else _percent(error), f"{_percent(low)} to {_percent(high)}"]
    counts = [str(judged["correct"]), f"{judged['judged']} of {samples}", str(judged["without_answer"])]
    return f"| {' | '.join([name, *numbers, *counts])} |"


def _percent(value: float) -> str:
    return f"{100 * value:.1f}%"


def _mean(summary: Mapping[str, Any]) -> str:
    mean = summary["mean_completion_tokens"]
    return "-" if mean is None else f"{mean:.0f}"


def _agreement(pair: str, found: Mapping[str, Any]) -> str:
    kappa = "" if found["kappa"] is None else f", Cohen's kappa {found['kappa']:.3f}"
    share = "" if found["share"] is None else f" ({_percent(found['share'])}{kappa})"
    return f"{pair} agree on {found['equal']} of the {found['samples']} samples that both judged{share}"
