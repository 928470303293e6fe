#!/usr/bin/env bash
# Usage: bash eval/run.sh BENCH JUDGE [options of eval/generate.py]
# Generates a benchmark's samples, or what is missing of them, and scores them.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=$root/.venv/bin/python
[ -x "$python" ] || python=python3
bench=$1 judge=$2
shift 2
status=0
out=$("$python" "$root/eval/generate.py" --bench "$bench" "$@") || status=$?
[ "$status" -le 1 ] || exit "$status" # 1: samples failed, which the summary counts
exec "$python" "$root/eval/score.py" --out-dir "$out" --judge "$judge"
