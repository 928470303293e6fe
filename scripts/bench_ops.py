#!/usr/bin/env python3
"""Checks every operator against PyTorch's on a GPU, then times it at the released shapes beside its bound.

python scripts/bench_ops.py [--only WORD] [--json FILE]

One row an operator and shape: microseconds (median of graph replays), the bound (bytes over 4.25 TB/s or operations
over the measured rate, whichever is longer), the share of it that is reached, the error. A case that fails gives a row
with the reason and the others go on; then the exit status is 1.
"""

import argparse
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from deepinfer.ops import cuda


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run the operators whose name holds this word")
    parser.add_argument("--json", help="write all rows to this file")
    parser.add_argument("--seconds", type=float, default=600, help="start no case after this time")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench_ops.py: there is no GPU", file=sys.stderr)
        return 2
    begin = time.monotonic()
    torch.backends.cuda.matmul.allow_tf32 = False
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda parts: cuda.build(*parts), cuda.LIBRARIES))
    print(f"kernels built after {time.monotonic() - begin:.0f} s", flush=True)
    from op_bench.cases import cases

    print(f"{'operator':26} {'shape':>14} {'us':>10} {'bound':>10} {'share':>6} {'error':>9}")
    rows = []
    for case in cases():
        if options.only in case.operator and time.monotonic() - begin < options.seconds:
            rows.append(run(case))
            print(line(rows[-1]), flush=True)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(
                {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}, file, indent=1
            )
    return int(any("failed" in row for row in rows))


def run(case: Any) -> dict[str, Any]:
    """Check and time one case; never raises."""
    from op_bench.timing import graph_us

    row: dict[str, Any] = {"operator": case.operator, "shape": case.regime, "bound_us": case.work.bound_us}
    try:
        prepared = case.prepare()
        error = prepared.error()
        row["error"] = error
        if not error <= case.limit:
            row["failed"] = f"error {error:.2e} is above {case.limit:.0e}"
        row["us"] = graph_us(prepared.calls)
    except Exception as reason:
        row["failed"] = f"{type(reason).__name__}: {str(reason)[:300]}"
    return row


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    name = f"{row['operator']:26} {row['shape']:>14}"
    if "us" in row:
        share = row["bound_us"] / row["us"]
        name += f" {row['us']:10.2f} {row['bound_us']:10.2f} {share:6.1%} {row['error']:9.1e}"
    return name + (f"  FAILED: {row['failed']}" if "failed" in row else "")


if __name__ == "__main__":
    sys.exit(main())
