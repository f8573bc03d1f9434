#!/usr/bin/env bash
# The image comes from node to node, from the first one, which reads it. node.sh contains this file after stage.sh, and defines
# node::fetch, which runs dray.runner.stage in a container of the shared image.
# shellcheck disable=SC2154,SC2034

node::tree() { # IMAGE SHA256: makes `copy`, or leaves it to what comes next; every node takes part, for all wait for one another
  local found
  if [[ -z "$copy" ]] || ! flock --exclusive --nonblock "$making"; then # a node that has the lock must not wait for another lock
    node::fetch <"$1" >/dev/null || true
  elif [[ -f "$copy" ]]; then
    node::fetch <"$copy" >/dev/null || true
  else
    part="$copy.part"
    rm --force -- "$part" # of a job that was killed
    if node::fetch <"$1" 1<>"$part" && found="$(sha256sum <"$part")"; then
      if [[ "${found%% *}" == "$2" ]]; then
        chmod 600 -- "$part"
        mv -- "$part" "$copy"
      else
        node::differs "${found%% *}" "$2"
      fi
    fi
    rm --force -- "$part"
    part=""
  fi
}
