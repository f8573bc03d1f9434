#!/usr/bin/env bash
# In the image: runs a verb of dray, until it ends or standard input does, as it does when the connection of ssh ends.
# verb.sh BIN VERB [WORD...]
set -euo pipefail
set -m # so that SIGINT is not ignored in the background

PATH="$1:$PATH"
shift
python3 -m dray "$@" </dev/null &
verb=$!
{ cat >/dev/null; kill -INT -- "-$verb"; } 2>/dev/null &
watch=$!
disown "$watch" # or bash tells of its end
# A terminal's signal reaches this script, and not the verb's own process group.
trap 'kill -INT -- "-$verb" 2>/dev/null || true' INT TERM HUP
while :; do # a signal ends the wait, and not the verb
  code=0
  wait "$verb" || code=$?
  kill -0 "$verb" 2>/dev/null || break
done
kill -- "-$watch" 2>/dev/null || true
exit "$code"
