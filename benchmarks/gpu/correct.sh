#!/usr/bin/env bash
# Whether dray trains right on this GPU, in at most four minutes: checks, losses, kernels, waits, resume, then
# checkpoints and memory. PYTHON is any Python with torch and transformers; page.md, figures.jsonl and the logs go to OUT.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
readonly root
export OUT="${OUT:-$root/benchmarks/results}"
mkdir -p "$OUT"
export TORCHINDUCTOR_CACHE_DIR="${TORCHINDUCTOR_CACHE_DIR:-${TMPDIR:-/tmp}/gpu-check-inductor-$UID}"
folder=$(mktemp -d "${TMPDIR:-/tmp}/gpu-check.XXXXXX")
readonly folder

code=0
timeout --kill-after=5 300 "${PYTHON:-python3}" "$root/benchmarks/gpu" --minutes "${MINUTES:-3.9}" --keep "$folder/runs" \
  --only checks,preflight,strategies,attention,documents,syncs,resume,deterministic,generate,checkpoint,memory "$@" || code=$?
tar -C "$folder/runs" -czf "$OUT/correct-logs.tar.gz" logs || echo "no logs were kept" >&2
rm -rf "$folder"
exit "$code"
