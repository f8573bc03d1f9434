#!/usr/bin/env bash
# The image is started only if one of these keys has signed it, and it is as it was signed. node.sh contains this file.

node::signed() { # ENGINE image|layer FILE WHY KEY...
  local -r engine="$1" what="$2" file="$3" why="$4"
  local found key groups
  shift 4
  if ! found="$("$engine" verify --local --json "$file" 2>&1)"; then
    found="$(grep '^FATAL' <<<"$found" || tail --lines=3 <<<"$found")"
  else
    found="${found//[[:space:]]/}"
    # A signature is for a group of the file's parts, and what starts could be in a group of another signer.
    groups="$("$engine" sif list "$file" | sed --quiet 's/^[0-9][0-9]* *|\([0-9][0-9]*\) .*/\1/p' | sort --unique)" || true
    for key; do
      [[ ! "$groups" =~ ^[0-9]+$ || "${found^^}" != *"\"FINGERPRINT\":\"$key\""* ]] || return 0
    done
    found="it is signed with another key, or its parts are not in one group, and each group has signatures of its own"
  fi
  printf 'dray: the %s lacks the required signature\n  where:  %s on node %s\n  wanted: a signature with one of %s\n  found:  %s\n  fix:    %s\n' \
    "$what" "$file" "$(node::host)" "$*" "$(paste --serial --delimiters=' ' <<<"$found")" \
    "sign it with dray image sign; import the public key on every node: $engine key import FILE" >&2
  node::record "$why"
}
