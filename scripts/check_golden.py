"""Compares the reference model, and the engine, with golden data: python scripts/check_golden.py DIR [--engine].

DIR holds `checkpoint/` (released layout) and files of inputs and expected values; cases are discovered from them.
Every row of an FP32 tensor must agree within 1e-3 (norm of the difference over norm of the expected row; prompts
named `prose` by the median row); drafts, hashes, patches, grids and number formats must be identical. A row that
fails because a window KV value lies on a rounding tie passes only if rounding it the other way gives the expected
row; the table says so. Exits with 0 if all agrees, else with 1.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from golden_check import inputs, target
from golden_check.compare import Group, Report, Result, errors, failing, results
from golden_check.data import Golden
from golden_check.engine import engine
from golden_check.engine_ties import EngineGroup, Values, explain_engine
from golden_check.ties import explain

from deepinfer.core.errors import DeepInferError

SUITES = (
    inputs.number_formats,
    inputs.engram,
    inputs.image_grids,
    target.trace,
    target.text,
    target.replay,
    target.draft,
    inputs.vision,
)


@torch.inference_mode()
def check(directory: Path, with_engine: bool = False, device: str = "cpu") -> Report:
    """Compare everything that `directory` holds; `device` is the engine's.

    Raises DeepInferError where it is no golden data.
    """
    golden, report = Golden(directory), Report()
    engine_suite = partial(engine, device=torch.device(device))
    for suite in (*SUITES, engine_suite) if with_engine else SUITES:
        for group in suite(golden):
            report.results += compare(group)
    report.not_compared = golden.unread()
    if not report.results:
        raise DeepInferError(f"{directory}: holds a checkpoint but no golden data, such as text_fp32.safetensors")
    return report


def compare(group: Group) -> list[Result]:
    """Run a group and hold it to what is expected of it."""
    actual = group.run()
    found = errors(group, actual)
    failures = failing(group, found)
    return results(group, found, actual, _tie(group, actual, failures) if failures else "")


def _tie(group: Group, actual: Values, failures: set[tuple[str, int]]) -> str:
    """The ties that explain why rows of the group fail; empty if none do."""
    if isinstance(group, EngineGroup):
        return explain_engine(group, actual)
    return "" if group.by_median else explain(group, failures)


def table(report: Report) -> str:
    """One line a result."""
    lines = [f"{'case':28} {'what':22} {'error':>8} {'limit':>6}  {'ok':4} {'tie'}"]
    for result in report.results:
        ok = "yes" if result.ok else "NO"
        tail = ", ".join(filter(None, (result.note, result.tie and f"tie: {result.tie}")))
        lines.append(
            f"{result.case:28} {result.what:22} {result.error:8.1e} {result.limit:6.0e}  {ok:4} {tail}".rstrip()
        )
    lines += [f"not compared: {name}" for name in report.not_compared]
    return "\n".join(lines)


def as_json(report: Report) -> str:
    """The same as JSON; an error that is no number is null."""

    def entry(result: Result) -> dict[str, object]:
        error = result.error if math.isfinite(result.error) else None
        return {**asdict(result), "error": error, "ok": result.ok}

    cases = [entry(result) for result in report.results]
    return json.dumps({"ok": report.ok, "cases": cases, "not_compared": report.not_compared}, indent=1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="Compare the reference model, and the engine, with golden data.")
    parser.add_argument("directory", type=Path, metavar="DIR", help="golden data, such as tests/golden")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results there")
    parser.add_argument("--engine", action="store_true", help="run the prompts through the engine, too")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="of the engine (default: cpu)")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("error: --device is cuda, but torch finds no GPU; it takes cpu here", file=sys.stderr)
        return 1
    try:
        report = check(options.directory, options.engine, options.device)
    except DeepInferError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(table(report))
    if options.json is not None:
        options.json.write_text(as_json(report) + "\n", encoding="utf-8")
    bad = sum(not result.ok for result in report.results)
    print(f"{len(report.results) - bad} of {len(report.results)} agree" + (f"; {bad} do not" if bad else ""))
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
