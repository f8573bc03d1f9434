#!/usr/bin/env bash
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
