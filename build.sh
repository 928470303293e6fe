#!/usr/bin/env bash
# Makes or completes .venv for one accelerator. Usage: ./build.sh [test]   (test: with the tools that `make test` needs)
#   DEEPINFER_ACCELERATOR  cpu (default), nvidia or ascend
#   PYTHON                 the interpreter to build .venv from (default: the first suitable one on PATH)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

CPU_TORCH="torch==2.13.0"
GPU_TORCH="torch>=2.11"
XGRAMMAR="xgrammar>=0.2.9,<0.3" # as in pyproject.toml
# What xgrammar needs on a CPU: all it asks for but Triton, which it never uses there and which takes several times more disk.
XGRAMMAR_NEEDS=("apache-tvm-ffi>=0.1.11" "transformers>=4.38" "pydantic>=2")

say() { echo "build.sh: $*"; }
die() { echo "build.sh: $*" >&2; exit 2; }

accelerator=${DEEPINFER_ACCELERATOR:-cpu}
case "$accelerator" in
    cpu | nvidia | ascend) ;;
    *) die "DEEPINFER_ACCELERATOR=$accelerator is unknown; it takes cpu (the default), nvidia or ascend" ;;
esac
extra=${1:-runtime}
case "$extra" in
    runtime | test) ;;
    *) die "argument '$extra' is unknown; it takes nothing, or test" ;;
esac

# What a Python has to be able to do for an accelerator; silence and exit status 0 mean yes.
recent() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }
has_torch() {
    "$1" - 2>/dev/null <<'PY'
import re, sys, torch
major, minor = (int(part) for part in re.match(r"(\d+)\.(\d+)", torch.__version__).groups())
sys.exit((major, minor) < (2, 11))
PY
}
has_cuda_torch() { has_torch "$1" && "$1" -c 'import sys, torch; sys.exit(torch.version.cuda is None)'; }
has_npu_torch() { has_torch "$1" && "$1" -c 'import torch_npu' 2>/dev/null; }

# find_python TEST NAME...: the first NAME on PATH that is recent enough and passes TEST.
find_python() {
    local test=$1 name
    shift
    for name in ${PYTHON:-"$@"}; do
        if recent "$name" && "$test" "$name"; then
            echo "$name"
            return
        fi
    done
    return 1
}

make_venv() {
    local python=$1
    shift
    say "making .venv with $("$python" --version 2>&1) for $accelerator"
    "$python" -m venv "$@" .venv || die "$python cannot make a virtual environment; install its venv module (Debian: python3-venv)"
}

need_python="no Python >= 3.11 found (tried ${PYTHON:-python3.11, python3.12, python3}); install one, or name it: PYTHON=/path/to/python ./build.sh"

new_cpu_venv() {
    local python
    python=$(find_python true python3.11 python3.12 python3) || die "$need_python"
    make_venv "$python"
}

# On a GPU machine a torch that is already installed fits its driver: build on it and never replace it.
new_nvidia_venv() {
    local python
    if python=$(find_python has_cuda_torch python3.12 python3.11 python3); then
        make_venv "$python" --system-site-packages
    else
        say "no Python with a CUDA build of torch >= 2.11 found; the package index's own torch will be installed"
        python=$(find_python true python3.12 python3.11 python3) || die "$need_python"
        make_venv "$python"
    fi
}

new_ascend_venv() {
    local python
    python=$(find_python has_npu_torch python3.12 python3.11 python3) ||
        die "no Python >= 3.11 with torch >= 2.11 and torch_npu found; install both as the Ascend toolkit's manual says, then run this again"
    make_venv "$python" --system-site-packages
}

pip_install() { .venv/bin/python -m pip install --quiet --disable-pip-version-check "$@"; }

install_torch() {
    case "$accelerator" in
        cpu)
            say "installing $CPU_TORCH"
            pip_install "$CPU_TORCH"
            ;;
        nvidia)
            if ! has_cuda_torch .venv/bin/python; then
                say "installing $GPU_TORCH"
                pip_install "$GPU_TORCH"
            fi
            has_cuda_torch .venv/bin/python || die "the torch in .venv is no CUDA build >= 2.11; remove .venv and run this again"
            ;;
        ascend) has_npu_torch .venv/bin/python || die "torch >= 2.11 with torch_npu is missing in .venv; remove .venv and run this again" ;;
    esac
}

install() {
    local target=.
    if [ "$extra" = test ]; then target=".[test]"; fi
    install_torch
    say "installing deepinfer${target#.} and what it needs"
    pip_install --editable "$target"
    if [ "$accelerator" = cpu ]; then
        pip_install "${XGRAMMAR_NEEDS[@]}"
        pip_install --no-deps "$XGRAMMAR"
    else
        pip_install "$XGRAMMAR"
    fi
}

[ "$accelerator" = ascend ] && say "warning: deepinfer has never been run on an Ascend device; expect to mend things"

# One stamp an extra: the key holds everything that decides what is installed, so an unchanged key needs no work.
key="$accelerator $PWD $(cat pyproject.toml build.sh | sha256sum | cut -d' ' -f1)"
stamp=.venv/.deepinfer-$extra
if [ -x .venv/bin/python ] && [ "$(cat "$stamp" 2>/dev/null)" = "$key" ]; then
    exit 0
fi
[ -d .venv ] || "new_${accelerator}_venv"
if ! recent .venv/bin/python || ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    die ".venv holds no working Python >= 3.11 with pip; remove it (rm -r .venv) and run this again"
fi
install
echo "$key" >"$stamp"
[ "$extra" = runtime ] || echo "$key" >.venv/.deepinfer-runtime
say "done: .venv is ready for $accelerator"
