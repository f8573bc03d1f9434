# To be sourced: parts of the suite within a time, with page.md, figures.jsonl and the logs in OUT.
# shellcheck shell=bash
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
readonly root
export OUT="${OUT:-$root/benchmarks/results}"
# The second script compiles nothing again. A folder of that name that is another user's may hold any code.
cache="${TMPDIR:-/tmp}/gpu-check-inductor-$UID"
mkdir -m 700 "$cache" 2>/dev/null || [[ -O "$cache" && ! -L "$cache" ]] || cache=$(mktemp -d)
export TORCHINDUCTOR_CACHE_DIR="${TORCHINDUCTOR_CACHE_DIR:-$cache}"

# kept::run NAME SECONDS MINUTES PARTS [OPTION...]: the suite's exit code; NAME-logs.tar.gz has the logs.
kept::run() {
  local name="$1" seconds="$2" minutes="$3" parts="$4" folder code=0
  shift 4
  mkdir -p "$OUT"
  folder=$(mktemp -d "${TMPDIR:-/tmp}/gpu-check.XXXXXX")
  timeout --kill-after=5 "$seconds" "${PYTHON:-python3}" "$root/benchmarks/gpu" --minutes "${MINUTES:-$minutes}" \
    --keep "$folder/runs" --only "$parts" "$@" || code=$?
  tar -C "$folder/runs" -czf "$OUT/$name-logs.tar.gz" logs || echo "no logs were kept" >&2
  rm -rf "$folder"
  return "$code"
}
