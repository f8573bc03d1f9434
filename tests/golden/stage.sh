#!/usr/bin/env bash
# Stages run r on one node. dray 0 wrote it from plan.json: change the recipe instead.
set -euo pipefail
image_id=''

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

# One task on each node holds the place of the image's copy, so that no other job makes a second one, while sbcast fills it.
# The task says what it has, a line at a time, and slurm/stage.sh tells it when the file is there. stage.sh contains this file
# after disk.sh.

node::hold() { # IMAGE FOLDER SHA256
  local copy="" making part size room said found
  node::disk "$@" || node::tell none
  node::join || node::tell full
  { exec {making}>>"$copy.making"; } 2>/dev/null || node::tell full
  flock --exclusive --nonblock "$making" || node::tell busy
  [[ ! -f "$copy" ]] || node::tell there
  part="$copy.part"
  # shellcheck disable=SC2064 # now, not then
  trap "rm --force -- $(printf '%q' "$part")" EXIT
  rm --force -- "$part" # of a job that was killed
  size="$(stat --format=%s -- "$1")"
  room="$(df --block-size=1 --output=avail -- "${copy%/*}" | tail --lines=1)" || room=0
  ((room > size)) || node::tell full
  printf 'free %s\n' "$part"
  IFS= read -r said || exit 0 # Slurm does not bring it
  [[ "$said" == sent && -f "$part" ]] || node::tell none
  found="$(sha256sum <"$part")" || node::tell none
  if [[ "${found%% *}" != "$3" ]]; then
    node::differs "${found%% *}" "$3"
    rm --force -- "$part" # who hears it ends this task at once
    node::tell differs
  fi
  chmod 600 -- "$part"
  mv -- "$part" "$copy"
  node::tell there
}

node::tell() { # WORD: and the end of this task
  echo "$1"
  exit 0
}

node::hold '/my images/i.sif' '/local disk' 5ec2e75ec2e75ec2e75ec2e75ec2e75ec2e75ec2e75ec2e75ec2e75ec2e70000
