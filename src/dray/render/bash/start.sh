#!/usr/bin/env bash
# Starts the engine and ends with its exit code. node.sh contains this file; `scratch` is the run's folder on this node.
# shellcheck disable=SC2154

node::start() { # COMMAND...
  local engine heard code
  # The engine has a process group of its own, and a signal that this script gets (Slurm may signal it alone) goes to its
  # first process, once: beside it in the group is what has mounted the image, without which ranks die of SIGBUS.
  set -m
  "$@" &
  set +m
  engine=$!
  for heard in TERM INT HUP USR1; do
    # shellcheck disable=SC2064 # now, not then
    trap "kill -$heard $engine 2>/dev/null" "$heard"
  done
  while :; do # a signal ends the wait, and not the engine
    code=0
    wait "$engine" || code=$?
    kill -0 "$engine" 2>/dev/null || break
  done
  wait "$engine" || code=$?
  exit "$code"
}

# shellcheck disable=SC2317 # the trap calls it
node::clean() { # what was compiled on this node goes when it has ended, and a staged image
  ! declare -F node::unstage >/dev/null || node::unstage
  rm -rf -- "$scratch"
}
trap node::clean EXIT
