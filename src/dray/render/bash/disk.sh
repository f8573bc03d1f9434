#!/usr/bin/env bash
# The place of the image's copy on this node's own disk, and how a file becomes the copy: once its digest is right.
# node.sh and stage.sh contain this file; `image_id` is the id of the image.
# shellcheck disable=SC2154,SC2034

node::disk() { # IMAGE FOLDER SHA256: sets `copy`, which only this user can make; fails, and says so, where that cannot be
  local -r folder="$2/dray-images-$UID"
  local found
  (umask 077 && mkdir --parents -- "$folder") 2>/dev/null || true
  # In a folder that another user has made, another user's image may wait. One look: nobody can change the file between two.
  found="$(LC_ALL=C stat --format='%F of user %u' -- "$folder" 2>&1)" || true
  if [[ "$found" != "directory of user $UID" ]] || ! chmod 700 -- "$folder"; then
    printf 'dray: the image is not copied to this node, and is read from the shared file\n  where:  %s\n  wanted: %s\n  found:  %s\n' \
      "$folder" "directory of user $UID" "$found" >&2
    return 1
  fi
  copy="$folder/${3:-$image_id-$(stat --format=%s -- "$1")}.sif"
}

node::join() { # sets `staged`, the lock that all who use the copy share: as long as one has it, nobody takes the copy away
  while :; do # until it is the one that others see
    { exec {staged}>>"$copy.lock"; } 2>/dev/null || return
    flock --shared "$staged"
    [[ ! "/proc/self/fd/$staged" -ef "$copy.lock" ]] || break
    exec {staged}>&-
  done
}

node::differs() { # FOUND WANTED: of the copy's digest
  printf 'dray: the copy of the image differs from the image\n  where:  %s\n  wanted: %s\n  found:  %s\n' "$copy" "$2" "$1" >&2
}
