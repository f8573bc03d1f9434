#!/usr/bin/env bash
# The copy of the image that Slurm's sbcast has made on this node's own disk. node.sh contains this file.
# shellcheck disable=SC2034

node::stage() { # IMAGE COPY SHA256: sets `image`: the copy, once it is proved, else the shared file
  local -r folder="${2%/*}"
  local wrong="" mode digest
  image="$1"
  # What jobs left here that Slurm has killed. A run that has started holds its copy open, and no start takes an hour.
  find "$folder/" -maxdepth 1 -name "dray-$UID-*.sif" -type f -user "$UID" -mmin +60 -delete 2>/dev/null || true
  mode="$(stat --dereference --format=%a -- "${folder:-/}")" || mode=777
  if [[ ! -f "$2" || -L "$2" ]]; then
    wrong="is not there"
  # What is proved below, nobody may exchange later.
  elif [[ ! -O "$2" || ! "$(stat --dereference --format=%u -- "${folder:-/}")" =~ ^(0|$UID)$ ]] ||
    ((8#$mode & 8#22 && !(8#$mode & 8#1000))) || ! chmod 600 -- "$2"; then
    wrong="could be changed by another user"
  else
    digest="$(sha256sum <"$2")" || digest=""
    [[ "${digest%% *}" == "$3" ]] || wrong="has another digest, ${digest%% *}"
  fi
  [[ -n "$wrong" ]] || { image="$2"; return; }
  echo "dray: the image is read from the shared file: the copy on this node, $2, $wrong" >&2
  rm -rf -- "$2" 2>/dev/null || true # it fills the disk, or the memory, and then this node's check may fail
}
