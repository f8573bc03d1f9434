#!/usr/bin/env bash
# Starts the engine and ends with its exit code. node.sh contains this file; `scratch` is the run's folder on this node, and
# `copy` sbcast's copy of the image.
# shellcheck disable=SC2154

readonly node__grace_s=10 # from SIGTERM to SIGKILL

node::start() { # COMMAND...
  local engine="" early="" heard code=0 started
  local -a own words
  for heard in TERM INT HUP USR1; do
    # shellcheck disable=SC2064 # now, not then
    trap "node::heard $heard" "$heard"
  done
  # The engine has a process group of its own, and a signal that this script gets (Slurm may signal it alone) goes to its
  # first process, once: beside it in the group is what has mounted the image, without which ranks die of SIGBUS.
  set -m
  "$@" &
  started=$!
  set +m
  # Until the child is the engine, it is a copy of this bash, whose handler would take a signal that nobody looks at later.
  mapfile -d '' -t own </proc/$$/cmdline
  words=("${own[@]}")
  while [[ "${words[*]}" == "${own[*]}" ]]; do
    sleep 0.01 # the disk with the engine's program may be slow
    words=()
    mapfile -d '' -t words <"/proc/$started/cmdline" || true # it has ended
  done 2>/dev/null
  engine=$started
  [[ -z "$early" ]] || node::heard "$early"
  while kill -0 "$engine" 2>/dev/null; do # a signal ends the wait, and not the engine
    wait "$engine" || true
  done
  wait "$engine" || code=$?
  node::sweep
  exit "$code"
}

# shellcheck disable=SC2317 # a trap calls it
node::heard() { # SIGNAL
  [[ -n "$engine" ]] || { early="$1"; return 0; } # without a number it would be that of what the signal interrupted
  kill "-$1" "$engine" 2>/dev/null || true
}

# Nothing of the run outlives this script. The runner has ended all, unless it was killed, as by a scancel: Slurm signals
# every process of the job, also what has mounted the image.
node::sweep() {
  local asked=" " until=$((SECONDS + node__grace_s)) process
  local -a left=()
  while mapfile -t left < <(node::left) && ((${#left[@]} > 0 && SECONDS < until + node__grace_s)); do
    for process in "${left[@]}"; do
      if ((SECONDS >= until)); then
        kill -KILL "$process" 2>/dev/null || true
      elif [[ "$asked" != *" $process "* ]]; then
        kill -TERM "$process" 2>/dev/null || true
        asked+="$process "
      fi
    done
    sleep 0.2
  done
}

# The processes with the run's folder on this node in their environment (DRAY_HEARTBEATS), but what looks for them.
node::left() {
  local file
  for file in $(cd /proc && grep --files-with-matches --null-data --no-messages "=$scratch\(/.*\)\?$" [0-9]*/environ); do
    [[ ! -e "/proc/$file" ]] || echo "${file%/environ}"
  done
}

# What was compiled on this node goes when it has ended, and sbcast's copy of the image.
trap 'rm -rf -- "$scratch" ${copy:+"$copy"} || true' EXIT
