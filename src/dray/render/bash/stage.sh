#!/usr/bin/env bash
# The image is copied to this node's own disk once, for all jobs of this user that run here, and goes with the last one.
# node.sh contains this file after disk.sh.
# shellcheck disable=SC2154,SC2034

copied="" part=""

node::stage() { # IMAGE FOLDER SHA256: sets `image`; it stays the shared one where there is no room
  local copy="" found making
  image="$1"
  [[ -f "$1" ]] || return 0 # a folder starts where it is
  if node::disk "$@" && ! { node::join && { exec {making}>>"$copy.making"; } 2>/dev/null; }; then
    node::full "$1"
    copy=""
  fi
  # Where sbcast has brought it to all nodes, there is nothing to bring.
  ! declare -F node::tree >/dev/null || [[ -n "${DRAY_STAGED:-}" ]] || node::tree "$1" "$3"
  [[ -n "$copy" ]] || return 0
  flock --exclusive "$making"
  if [[ ! -f "$copy" ]]; then
    part="$copy.part"
    if ! found="$(set -o pipefail; tee -- "$part" <"$1" | sha256sum)"; then
      rm --force -- "$part"
      part="" # from here on it may be another job's, which may find room
      exec {making}>&-
      node::full "$1"
      return 0
    fi
    if [[ -n "$3" && "${found%% *}" != "$3" ]]; then
      rm --force -- "$part"
      node::differs "${found%% *}" "$3"
      exit 69
    fi
    mv -- "$part" "$copy"
    part=""
  fi
  exec {making}>&-
  image="$copy" copied="$copy"
}

node::full() { # IMAGE
  echo "dray: no room for a copy of the image in ${copy%/*}: it is read from $1" >&2
}

# shellcheck disable=SC2317 # node::clean calls it
node::unstage() {
  [[ -z "$part" ]] || rm --force -- "$part" # of a copy that was broken off
  if [[ -n "$copied" ]] && flock --exclusive --nonblock "$staged"; then
    rm --force -- "$copied" "$copied.making" "$copied.lock"
  fi
}
