#!/usr/bin/env bash
# The options of shifter on a node. node.sh contains this file after places.sh.
# shellcheck disable=SC2154,SC2034

node::option() { # PATH ro|rw: the site mounts, and the container says whether it has the path
  mounts+=("$1")
}

node::environment() { # NAME...: those that are set, as lines; shifter takes quotes as they are
  # Where bash traces (SHELLOPTS=xtrace), the log would show the values.
  { local -; set +x; } 2>/dev/null
  local variable
  for variable; do
    [[ ! -v "$variable" ]] || printf '%s=%s\n' "$variable" "${!variable}"
  done
}

node::shifter() { # ENGINE KIND [NAME...]: the names are those of Slurm's task and of pass_env
  { local -; set +x; } 2>/dev/null
  local variable
  for variable in "${@:3}"; do
    # It reads lines, without the blanks at their ends: what follows a line break would be a variable of its own.
    if [[ -v "$variable" && ("${!variable}" == *$'\n'* || "${!variable}" == *[[:space:]]) ]]; then
      printf 'dray: %s has a line break or ends with a blank, which shifter cannot pass on\n  where:  node %s\n' \
        "$variable" "$(node::host)" >&2
      printf '  fix:    leave it out of pass_env\n' >&2
      exit 78
    fi
  done
}
