#!/usr/bin/env bash
# The option of Apptainer, Docker and Podman for a mount. node.sh contains this file after places.sh.
# shellcheck disable=SC2154,SC2034

node::option() { # PATH ro|rw: as CSV, so that commas and quotes in it survive
  local -r quoted="${1//\"/\"\"}"
  local mode=""
  [[ "$2" == rw ]] || mode=",$read_only"
  mounts+=("--mount=type=bind,\"src=$quoted\",\"dst=$quoted\"$mode")
}
