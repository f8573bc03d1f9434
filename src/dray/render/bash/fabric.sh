#!/usr/bin/env bash
# Libraries of the host for the fabric. node.sh contains this file after mounts.sh.

node::newest() { # PATTERN WANTED WHY: sets `newest`
  newest="$(compgen -G "$1" | sort --version-sort | tail --lines=1)" || true
  [[ -n "$newest" ]] || node::unfit "$@"
}

node::library() { # PATTERN WANTED WHY: the engine puts the host's library into the container's library path
  node::newest "$@"
  libraries+="${libraries:+,}$newest"
  export APPTAINER_CONTAINLIBS="$libraries" SINGULARITY_CONTAINLIBS="$libraries"
}

libraries=""
