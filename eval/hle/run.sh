#!/usr/bin/env bash
# HLE, scored by the judge that EVAL_JUDGE_BASE_URL and EVAL_JUDGE_MODEL name. Options are those of eval/generate.py; with the same ones, a run that was stopped goes on.
exec bash "$(dirname "${BASH_SOURCE[0]}")/../run.sh" hle llm "$@"
