#!/usr/bin/env bash
# The image is copied to this node's own disk once, for all jobs of this user that run here, and goes with the last one.
# node.sh contains this file; `image_id` is the id of the image.
# shellcheck disable=SC2154,SC2034

copied="" part=""

node::stage() { # IMAGE FOLDER SHA256: sets `image`; it stays the shared one where there is no room
  local -r folder="$2/dray-images-$UID" size="$(stat --format=%s -- "$1")"
  local -r copy="$folder/$image_id-$size.sif"
  local found making
  image="$1"
  [[ -f "$1" ]] || return 0 # a folder starts where it is
  (umask 077 && mkdir --parents -- "$folder") || return 0
  # In a folder that another user has made, another user's image may wait.
  [[ -O "$folder" && ! -L "$folder" ]] || return 0
  while :; do # until the lock is the one that others see; it is shared by all that use the copy
    exec {staged}>>"$copy.lock" || return 0
    flock --shared "$staged"
    [[ ! "/proc/self/fd/$staged" -ef "$copy.lock" ]] || break
    exec {staged}>&-
  done
  exec {making}>>"$copy.making"
  flock --exclusive "$making"
  if [[ ! -f "$copy" ]]; then
    part="$copy.part"
    if ! found="$(set -o pipefail; tee -- "$part" <"$1" | sha256sum)"; then
      rm --force -- "$part"
      echo "dray: no room for the image in $folder: started from $1" >&2
      return 0
    fi
    if [[ -n "$3" && "${found%% *}" != "$3" ]]; then
      rm --force -- "$part"
      printf 'dray: the copy of the image differs from the image\n  where:  %s\n  wanted: %s\n  found:  %s\n' \
        "$copy" "$3" "${found%% *}" >&2
      exit 69
    fi
    mv -- "$part" "$copy"
  fi
  exec {making}>&-
  image="$copy" copied="$copy"
}

# shellcheck disable=SC2317 # node::clean calls it
node::unstage() {
  [[ -z "$part" ]] || rm --force -- "$part" # of a copy that was broken off
  if [[ -n "$copied" ]] && flock --exclusive --nonblock "$staged"; then
    rm --force -- "$copied" "$copied.making" "$copied.lock"
  fi
}
