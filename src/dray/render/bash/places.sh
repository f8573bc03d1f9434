#!/usr/bin/env bash
# What a node must have, and what the container sees of it. node.sh contains this file, after the data that it reads:
# `number` and `name` are the names of the variables with this node's number and name, `read_only` is the engine's word.
# shellcheck disable=SC2154,SC2034

declare -a binds=() mounts=()

node::unfit() { # PATH WANTED RECORD: the record is what the runner writes, once the container has started
  printf 'dray: %s does not exist\n  wanted: %s\n  where:  node %s\n' "$1" "$2" "$(node::host)" >&2
  node::record "$3"
}

node::host() { echo "${!name:-$(</proc/sys/kernel/hostname)}"; }

node::record() { # RECORD: and the end of this node
  local -r record="failures/node-${!number:-unknown}.json"
  # A disk that is full must not hide the exit code as well.
  if printf '{"time": %s, "node": "%s", %s}\n' "$(date +%s.%N)" "$(node::host)" "$1" >"$record.part"; then
    mv -- "$record.part" "$record"
  fi || true
  exit 69
}

node::need() { # PATH WANTED RECORD
  [[ -e "$1" ]] || node::unfit "$@"
}

node::bind() { # PATH ro|rw: also where a link leads to, since programs ask for a file's real path
  local path real
  real="$(realpath -- "$1"; echo .)" # the dot keeps what a line break at the end would lose
  for path in "$1" "${real%$'\n.'}"; do
    binds+=("$path"$'\t'"$2")
  done
}

node::mounts() { # fills `mounts`, the options that the engine gets
  local entry path last=""
  # A folder before what lies in it: the last mount is the one that is seen. Who may write decides.
  while IFS= read -r -d '' entry; do
    path="${entry%$'\t'*}"
    [[ "$path" != "$last" ]] || unset 'mounts[-1]'
    node::option "$path" "${entry##*$'\t'}"
    last="$path"
  done < <(printf '%s\0' "${binds[@]}" | LC_ALL=C sort --zero-terminated --unique)
}
