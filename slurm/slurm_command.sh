#!/usr/bin/env bash
# In the image, under the name of a program of Slurm: login.sh runs that program outside, and this script prints its output.
set -euo pipefail

relay="${0%/*/*}"
call="$(mktemp -d -- "$relay/call-XXXXXX")"
printf '%s\0' "${0##*/}" "$PWD" "$@" >"$call/argv"
mkfifo -- "$call/code"
printf '%s\n' "${call##*/}" >"$relay/calls"
read -r code <"$call/code"
cat -- "$call/out"
cat -- "$call/err" >&2
exit "$code"
