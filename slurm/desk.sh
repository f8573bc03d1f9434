#!/usr/bin/env bash
# On the cluster of `dray cluster up`: a verb of dray, in the CPU image, as at a login node without Python.
# desk.sh VERB [WORD...]
set -euo pipefail

home="$(realpath -- "${BASH_SOURCE[0]}")"
home="${home%/slurm/desk.sh}"
image="$home/build/dray-cpu.sif"
if [[ ! -f "$image" ]]; then
  printf 'dray: the image does not exist\n  wanted: %s\n  fix:    make image-cpu\n' "$image" >&2
  exit 78
fi
# slurm/verb.sh ends the verb with its standard input, and here there is none: a pipe that is never closed.
pipe="$(mktemp --dry-run -- "${TMPDIR:-/tmp}/dray-stdin-XXXXXX")"
mkfifo -- "$pipe"
exec {open}<>"$pipe"
rm -- "$pipe"
exec bash "$home/slurm/login.sh" /shared "$image" "$PWD" 0 "$@" <&"$open"
