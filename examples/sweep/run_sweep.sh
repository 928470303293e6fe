#!/usr/bin/env bash
# Sweeps one setting of examples/benchmark.py and collects its results in sweeps/TAG/results.jsonl, a line a run.
#
#   examples/sweep/run_sweep.sh prefill|decode|encoder [TAG] [options of benchmark.py or ve_sweep.py]
#
#   prefill   rows of a step: 4,096 .. 65,536           (PREFILL_SIZES="4096 8192 ...")
#   decode    requests of a step: 8 .. 256              (DECODE_SIZES="8 16 ...")
#   encoder   the vision encoder alone, over sizes of images and images a batch
#
# A run that fails is reported and the sweep goes on; then the exit status is 1. TAG defaults to the mode.
set -uo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
python=${PYTHON:-python}

usage() { sed -n '2,12s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 2; }
mode=${1:-}
case "$mode" in prefill | decode | encoder) shift ;; *) usage ;; esac
tag=$mode
if [ $# -gt 0 ] && [ "${1#-}" = "$1" ]; then tag=$1; shift; fi

folder="sweeps/$tag"
mkdir -p "$folder" || exit 2
results="$folder/results.jsonl"
part=$(mktemp)
trap 'rm -f "$part"' EXIT
failed=0

# run COMMAND...: one run, whose JSON becomes a line of the results.
run() {
    : >"$part"
    if "$@" --json "$part" && [ -s "$part" ]; then
        "$python" -c 'import json, sys; print(json.dumps({"mode": sys.argv[1], **json.load(open(sys.argv[2]))}))' \
            "$mode" "$part" >>"$results" || failed=1
    else
        echo "run_sweep.sh: failed: $*" >&2
        failed=1
    fi
}

case "$mode" in
    prefill)
        for size in ${PREFILL_SIZES:-4096 8192 16384 32768 65536}; do
            run "$python" "$here/../benchmark.py" --decode_num_requests 0 --prefill_batch_size "$size" "$@"
        done
        ;;
    decode)
        for size in ${DECODE_SIZES:-8 16 32 64 128 256}; do
            run "$python" "$here/../benchmark.py" --prefill_batch_size 0 --decode_num_requests "$size" "$@"
        done
        ;;
    encoder) "$python" "$here/ve_sweep.py" --json "$results" "$@" || failed=1 ;; # it adds a line a case itself
esac
echo "run_sweep.sh: results in $results"
exit $failed
