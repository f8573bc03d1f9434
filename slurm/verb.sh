#!/usr/bin/env bash
# In the image: runs a verb of dray, until it ends or standard input does, as it does when the connection of ssh ends.
# verb.sh BIN VERB [WORD...]
set -euo pipefail
set -m # so that SIGINT is not ignored in the background

PATH="$1:$PATH"
shift
python3 -m dray "$@" </dev/null &
verb=$!
{ cat >/dev/null; kill -INT "$verb"; } 2>/dev/null &
watch=$!
disown "$watch" # or bash tells of its end
code=0
wait "$verb" || code=$?
kill -- "-$watch" 2>/dev/null || true
exit "$code"
