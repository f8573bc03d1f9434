#!/bin/sh
# The container's own shell runs this with the paths that the container must have, --, and a command.
while [ "$1" != -- ]; do
  if [ ! -e "$1" ]; then
    printf 'dray: shifter does not mount a folder of the run\n  found:  %s\n' "$1" >&2
    printf '  wanted: a folder on a file system that the site mounts in Shifter (docs/reference/engines.md)\n' >&2
    exit 69
  fi
  shift
done
shift
exec "$@"
