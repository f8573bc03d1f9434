#!/usr/bin/env bash
# An adopted image is used where it is, and its owner may have changed it. node.sh contains this file after places.sh.

node::same() { # FILE WANTED RECORD
  local found
  found="$(stat --dereference --format='owner %u, inode %i, %s bytes, changed %.9Y' -- "$1")" || true
  [[ "$found" == "$2" ]] && return
  printf 'dray: %s was changed since it was adopted\n  where:  node %s\n  wanted: %s\n  found:  %s\n' \
    "$1" "$(node::host)" "$2" "$found" >&2
  node::record "$3"
}
