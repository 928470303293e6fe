#!/usr/bin/env bash
# The sample set, end to end and offline, with the bundled checkpoint. Options are those of eval/generate.py.
# Its free answers are scored only where EVAL_JUDGE_BASE_URL names a judge.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
sample=(--data sample --prompt bare --samples 4 --temperature 0.4 --max-tokens 90)
bash "$here/../run.sh" aime rule "${sample[@]}" "$@"
bash "$here/../run.sh" gpqa rule "${sample[@]}" --no-thinking --regex "ANSWER: [A-D]" "$@"
if [ -n "${EVAL_JUDGE_BASE_URL:-}" ]; then
    bash "$here/../run.sh" hle llm "${sample[@]}" --no-thinking "$@"
else
    echo "hle: skipped; its free answers need a judge (EVAL_JUDGE_BASE_URL, EVAL_JUDGE_MODEL)"
fi
