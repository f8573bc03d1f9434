#!/usr/bin/env bash
# The image is started only if one of these keys has signed it, and it is as it was signed. node.sh contains this file.

node::signed() { # ENGINE IMAGE RECORD KEY...
  local -r engine="$1" file="$2" record="$3"
  local found key
  shift 3
  if found="$("$engine" verify --local --json "$file" 2>&1)"; then
    found="${found//[[:space:]]/}"
    for key; do
      [[ "${found^^}" != *"\"FINGERPRINT\":\"$key\""* ]] || return 0
    done
    found="it is signed with another key"
  fi
  printf 'dray: the image is not signed as it must be\n  where:  %s on node %s\n  wanted: a signature with one of %s\n  found:  %s\n  fix:    %s\n' \
    "$file" "$(node::host)" "$*" "$(tail --lines=3 <<<"$found" | paste --serial --delimiters=' ')" \
    "dray image sign; and on every node $engine key import FILE, with the public key" >&2
  node::record "$record"
}
