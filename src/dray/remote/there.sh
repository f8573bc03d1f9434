#!/usr/bin/env bash
# What runs at the other end of ssh: dray sends it to a bash there, followed by a call of there::main. rsync copies the
# files. An image and dray's scripts have the digest of their content as their name, and a run has its own folder of code.

there::die() { # CODE LINE...: as job::die
  local -r code="$1"
  shift
  printf 'dray: %s\n' "$1" >&2
  shift
  (($# == 0)) || printf '  %s\n' "$@" >&2
  exit "$code"
}

there::folder() { # FOLDER: it is this user's, and nobody else writes into it
  local mode why
  why="$( (umask 077; mkdir -p -- "$1") 2>&1)" || there::die 78 "the remote's folder cannot be created" \
    "where:  $1 on $HOSTNAME" "found:  ${why##*: }" "fix:    dray remote add with a folder that you may write"
  [[ -O "$1" ]] || there::die 78 "the remote's folder belongs to another user, who could change what your jobs start" \
    "where:  $1 on $HOSTNAME" "wanted: a folder of $(id --user --name)" "found:  a folder of $(stat --dereference --format=%U -- "$1")" \
    "fix:    dray remote add with a folder of your own"
  mode="$(stat --dereference --format=%a -- "$1")"
  ((!(8#$mode & 8#22))) || there::die 78 "other users could change what your jobs start" "where:  $1 on $HOSTNAME" \
    "found:  mode $mode" "fix:    chmod go-w on that folder there, or choose another folder"
  [[ -w "$1" && -x "$1" ]] || there::die 78 "the remote's folder cannot be written" "where:  $1 on $HOSTNAME" "found:  mode $mode"
}

there::image() { # FOLDER IMAGE: prints `here` or `missing`. Its content is read again when the file is another one than that which arrived.
  local -r image="$1/$2"
  local found=""
  there::folder "$1"
  (umask 077; mkdir -p -- "$1"/{code,dray,images,sites})
  [[ -e "$image" || -L "$image" ]] || { echo missing; return; }
  if [[ ! -L "$image" && -f "$image" && -O "$image" ]]; then
    [[ "$(stat --format='%s %Y %i' -- "$image")" != "$(cat -- "$image.arrived" 2>/dev/null)" ]] || { echo here; return; }
    found="$(sha256sum <"$image")"
    found="${found%% *}"
    [[ "$found" != "$(basename -- "$image" .sif)" ]] || { there::note "$image"; echo here; return; }
  fi
  there::die 69 "another file has the image's name" "where:  $image on $HOSTNAME" "wanted: sha256:$(basename -- "$image" .sif)" \
    "found:  ${found:+sha256:}${found:-no file of yours}" "fix:    remove it there: it was changed or damaged"
}

there::note() { # IMAGE: its content has its digest
  stat --format='%s %Y %i' -- "$1" >"$1.arrived"
}

there::arrived() { # FOLDER IMAGE: the copy gets its name when it is whole, checked and on the disk
  local -r image="$1/$2"
  local found
  [[ -e "$image.part" || ! -e "$image" ]] || return 0 # another submit has copied and checked the same image meanwhile
  sync -- "$image.part"
  found="$(sha256sum <"$image.part")"
  [[ "${found%% *}" == "$(basename -- "$image" .sif)" ]] || {
    rm -- "$image.part"
    there::die 69 "the copy arrived damaged, and was removed" "where:  $image on $HOSTNAME" "found:  sha256:${found%% *}" "fix:    try again"
  }
  mv --no-target-directory -- "$image.part" "$image"
  there::note "$image"
}

there::keep() { # FOLDER DRAY IMAGE: what verbs that copy nothing use from now on
  local part
  part="$(mktemp -- "$1/.current-XXXXXX")"
  printf '%s\n' "$2" "$3" >"$part"
  mv --no-target-directory -- "$part" "$1/current"
}

there::verb() { # FOLDER DRAY IMAGE RUN_IN BRING VERB [WORD...]: by the scripts that were copied; three items, or empty
  local -a current=("$2" "$3")
  there::folder "$1"
  [[ -n "$2" || ! -f "$1/current" ]] || mapfile -t current <"$1/current"
  [[ "${current[*]}" =~ ^dray/[0-9a-f]{64}\ images/[0-9a-f]{64}\.sif$ && -f "$1/${current[1]}" && -f "$1/${current[0]}/slurm/login.sh" ]] ||
    there::die 78 "dray and its image are missing on the remote" "where:  $1 on $HOSTNAME" \
      "fix:    dray submit --on copies them; so does dray remote check NAME --image cpu"
  [[ -z "$4" ]] || mkdir -p -- "$1/$4"
  DRAY_HOME="$1/${current[0]}" bash -- "$1/${current[0]}/slurm/login.sh" "$1" "$1/${current[1]}" "$1${4:+/$4}" "${@:5}"
}

there::check() { # FOLDER: what a run needs here
  local name missing=""
  there::folder "$1"
  for name in rsync sha256sum sbatch squeue scancel scontrol; do
    command -v "$name" >/dev/null || missing+=" $name"
  done
  command -v apptainer >/dev/null || command -v singularity >/dev/null || missing+=" apptainer"
  [[ -z "$missing" ]] || there::die 69 "a program is missing on the remote:$missing" "where:  PATH=$PATH on $HOSTNAME" \
    "fix:    load the site's module in your ~/.bash_profile there"
  printf 'bash %s, %s, %s\n' "${BASH_VERSION%%(*}" "$(rsync --version | head --lines=1)" "$(sbatch --version)"
  printf '%s\n' "$(apptainer --version 2>/dev/null || singularity --version)"
  printf '%s free in %s\n' "$(df --output=avail --human-readable -- "$1" | tail --lines=1 | tr --delete ' ')" "$1"
}

there::main() { # FUNCTION [ARGUMENT...]
  local status
  set -euo pipefail
  # 255 is ssh's own, of a connection that is lost.
  trap 'status=$?; ((status != 255)) || status=1; exit "$status"' EXIT
  "there::$1" "${@:2}"
}
