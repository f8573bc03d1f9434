#!/usr/bin/env bash
# Libraries of the host for the fabric. node.sh contains this file after places.sh.

declare -a libraries=()

node::newest() { # PATTERN WANTED RECORD: sets `newest`
  newest="$(compgen -G "$1" | sort --version-sort | tail --lines=1)" || true
  [[ -n "$newest" ]] || node::unfit "$@"
}

node::library() { # PATTERN WANTED RECORD: the engine puts the host's library into the container's library path
  node::newest "$@"
  libraries+=("$newest")
  local joined
  printf -v joined '%s,' "${libraries[@]}"
  export APPTAINER_CONTAINLIBS="${joined%,}" SINGULARITY_CONTAINLIBS="${joined%,}"
}
