#!/usr/bin/env bash
# What runs at the other end of ssh: dray sends it to a bash there, followed by a call of there::main. bash, tar and
# coreutils only. Everything that is brought has the digest of its content as its name.

there::die() { # CODE LINE...: as lib::die
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

there::has() { # FOLDER ITEM...: for each a line, `here` or `missing`, and its name there
  local item name number state
  there::folder "$1"
  for item in "${@:2}"; do
    state=here name="$item" number=1
    if [[ "$item" == *.sif ]]; then
      there::image "$1/$item" || state=missing
    else
      # A command may change the files it was started with, and may still run: that folder is left as it is.
      until there::whole "$1/$name"; do
        [[ -e "$1/$name" || -L "$1/$name" ]] || { state=missing; break; }
        name="$item-$((++number))"
      done
    fi
    echo "$state $name"
  done
}

there::whole() { # FOLDER: whether all files are there that were brought, and unchanged
  (cd -- "$1" && { [[ -f .dray-sums && ! -s .dray-sums ]] || sha256sum --check --status .dray-sums; }) 2>/dev/null
}

there::image() { # FILE: whether the image is there. Its content is read again when the file is another one than that which arrived.
  local -r digest="$(basename -- "$1" .sif)"
  local found
  [[ -e "$1" || -L "$1" ]] || return 1
  if [[ ! -L "$1" && -f "$1" && -O "$1" ]]; then
    [[ "$(stat --format='%s %Y %i' -- "$1")" != "$(cat -- "$1.arrived" 2>/dev/null)" ]] || return 0
    found="$(sha256sum <"$1")"
    found="${found%% *}"
    [[ "$found" != "$digest" ]] || { there::arrived "$1"; return 0; }
  fi
  there::die 69 "another file has the image's name" "where:  $1 on $HOSTNAME" "wanted: sha256:$digest" \
    "found:  ${found:+sha256:}${found:-no file of yours}" "fix:    remove it there: it was changed or damaged"
}

there::arrived() { # FILE
  stat --format='%s %Y %i' -- "$1" >"$1.arrived"
}

there::receive() { # FOLDER ITEM SIZE SHA256: from standard input; under its name only when it is whole, checked and on the disk
  local -r target="$1/$2" size="$3" digest="$4"
  local free found why
  umask 077
  there::folder "$1"
  mkdir -p -- "${target%/*}"
  find "${target%/*}" -maxdepth 1 -name '.arriving-*' -mmin +1440 -exec rm -rf -- {} +
  free="$(df --output=avail --block-size=1 -- "${target%/*}" | tail --lines=1)"
  ((free >= size)) || there::die 69 "the remote's disk has too little free space" "where:  ${target%/*} on $HOSTNAME" \
    "wanted: $size bytes" "found:  ${free// /} bytes" "fix:    free space, or choose another folder"
  arriving="$(mktemp -d -- "${target%/*}/.arriving-XXXXXX")"
  head --bytes="$size" >"$arriving/part" || there::die 69 "the copy cannot be written" "where:  ${target%/*} on $HOSTNAME" \
    "fix:    check quota and free space there"
  sync -- "$arriving/part"
  found="$(sha256sum <"$arriving/part")"
  [[ "${found%% *}" == "$digest" ]] || there::die 69 "the copy arrived damaged, and was removed" "where:  $target on $HOSTNAME" \
    "wanted: sha256:$digest, $size bytes" "found:  sha256:${found%% *}, $(stat --format=%s -- "$arriving/part") bytes" "fix:    try again"
  if [[ "$target" == *.sif ]]; then
    mv --no-target-directory -- "$arriving/part" "$target"
    there::arrived "$target"
  else
    mkdir -- "$arriving/tree"
    # With the time of now: sites remove files from scratch that look old.
    tar --extract --touch --no-same-owner --directory="$arriving/tree" --file="$arriving/part"
    sync -f -- "$arriving/tree"
    why="$(mv --no-target-directory -- "$arriving/tree" "$target" 2>&1)" || there::whole "$target" || # another one was quicker
      there::die 69 "the copy cannot be renamed" "where:  $target on $HOSTNAME" "found:  ${why##*: }" "fix:    try again"
  fi
}

there::keep() { # FOLDER DRAY IMAGE: what verbs that bring nothing use from now on
  local part
  part="$(mktemp -- "$1/.current-XXXXXX")"
  printf '%s\n' "$2" "$3" >"$part"
  mv --no-target-directory -- "$part" "$1/current"
}

there::verb() { # FOLDER DRAY IMAGE RUN_IN BRING VERB [WORD...]: by the script that was brought; three items, or empty
  local -a current=("$2" "$3")
  there::folder "$1"
  [[ -n "$2" || ! -f "$1/current" ]] || mapfile -t current <"$1/current"
  [[ "${current[*]}" =~ ^dray/[0-9a-f]{64}(-[0-9]+)?\ images/[0-9a-f]{64}\.sif$ && -f "$1/${current[1]}" && -f "$1/${current[0]}/slurm/login.sh" ]] ||
    there::die 78 "dray and its image are missing on the remote" "where:  $1 on $HOSTNAME" \
      "fix:    dray submit --on copies them; so does dray remote check NAME --image cpu"
  bash -- "$1/${current[0]}/slurm/login.sh" "$1" "$1/${current[1]}" "$1${4:+/$4}" "${@:5}"
}

there::check() { # FOLDER: what a run needs here
  local name missing=""
  there::folder "$1"
  for name in tar sha256sum sbatch squeue scancel scontrol; do
    command -v "$name" >/dev/null || missing+=" $name"
  done
  command -v apptainer >/dev/null || command -v singularity >/dev/null || missing+=" apptainer"
  [[ -z "$missing" ]] || there::die 69 "a program is missing on the remote:$missing" "where:  PATH=$PATH on $HOSTNAME" \
    "fix:    load the site's module in your ~/.bash_profile there"
  printf 'bash %s, %s, %s\n' "${BASH_VERSION%%(*}" "$(tar --version | head --lines=1)" "$(sbatch --version)"
  printf '%s\n' "$(apptainer --version 2>/dev/null || singularity --version)"
  printf '%s free in %s\n' "$(df --output=avail --human-readable -- "$1" | tail --lines=1 | tr --delete ' ')" "$1"
}

there::main() { # MARK FUNCTION [ARGUMENT...]: what the profile has printed stands before the mark
  set -euo pipefail
  arriving="" status=0
  # 255 is ssh's own, of a connection that is lost.
  trap 'status=$?; [[ -z "$arriving" ]] || rm -rf -- "$arriving"; ((status != 255)) || status=1; exit "$status"' EXIT
  printf '%s\n' "$1"
  "there::$2" "${@:3}"
}
