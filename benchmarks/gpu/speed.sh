#!/usr/bin/env bash
# What is worth most, in at most five minutes: the machine, and the speed of dray, of a hand-written loop and of the
# stock Trainer. PYTHON is any Python with torch and transformers; page.md, figures.jsonl and the logs go to OUT.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
readonly root
export OUT="${OUT:-$root/benchmarks/results}"
mkdir -p "$OUT"
export TORCHINDUCTOR_CACHE_DIR="${TORCHINDUCTOR_CACHE_DIR:-${TMPDIR:-/tmp}/gpu-check-inductor-$UID}"
folder=$(mktemp -d "${TMPDIR:-/tmp}/gpu-check.XXXXXX")
readonly folder

code=0
timeout --kill-after=5 340 "${PYTHON:-python3}" "$root/benchmarks/gpu" --minutes "${MINUTES:-4.8}" --keep "$folder/runs" \
  --only machine,gpt2,handwritten,stock,triton,llama "$@" || code=$?
tar -C "$folder/runs" -czf "$OUT/speed-logs.tar.gz" logs || echo "no logs were kept" >&2
rm -rf "$folder"
exit "$code"
