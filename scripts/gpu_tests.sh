#!/usr/bin/env bash
# Runs the tests that need a GPU, on a machine that has one and a Python with a CUDA build of torch.
# Usage: scripts/gpu_tests.sh [pytest arguments]      PYTHON=... names the interpreter (default: .venv's, else python3)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
if [ -z "${PYTHON:-}" ] && [ -x .venv/bin/python ]; then python=.venv/bin/python; fi
"$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || { echo "gpu_tests.sh: torch finds no GPU" >&2; exit 2; }
PYTHONPATH=. exec "$python" -m pytest -o addopts="" -q -m gpu tests "$@"
