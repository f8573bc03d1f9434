#!/usr/bin/env bash
# Runs one command beside an active run. node.sh's other parts start the container; nothing of the run is changed.
# shellcheck disable=SC2034

# Of this command alone: what an engine copies for it, and takes away with it.
scratch="$(mktemp --directory)"
[[ ! -t 0 || ! -t 1 ]] || tty=1
trap 'rm -rf -- "$scratch"' EXIT

node::start() { "$@"; } # in the foreground, with the terminal
