#!/usr/bin/env bash
# AIME 2026, scored by rule. Options are those of eval/generate.py; with the same ones, a run that was stopped goes on.
exec bash "$(dirname "${BASH_SOURCE[0]}")/../run.sh" aime rule "$@"
