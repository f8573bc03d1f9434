#!/usr/bin/env bash
# The options of ch-run on a node. node.sh contains this file after places.sh; `scratch` is the run's folder on this node.
# shellcheck disable=SC2154,SC2034

declare -a devices=()

node::option() { # PATH ro|rw: ch-run has no mount that nobody may write
  if [[ "$1" == *:* ]]; then # where a link leads to; the planner has seen the rest
    printf 'dray: charliecloud cannot mount a path with : in it\n  where:  node %s\n  found:  %s\n' "$(node::host)" "$1" >&2
    node::record '"rank": null, "code": 69, "why": "charliecloud cannot mount a path with : in it", "log": null, "last_lines": []'
  fi
  mounts+=("--bind=$1:$1")
}

node::identity() { # IMAGE: the head of a squashfs has its size, its time and where its tables are; a folder has what dray sealed
  if [[ -d "$1" ]]; then cat -- "$1/opt/dray/image.json"; else head --bytes=96 -- "$1"; fi | sha256sum | head --bytes=32
}

node::environment() { # NAME...: those that are set, as lines; ch-run takes one pair of quotes off
  # Where bash traces (SHELLOPTS=xtrace), the log would show the values.
  { local -; set +x; } 2>/dev/null
  local variable
  for variable; do
    [[ ! -v "$variable" ]] || printf "%s='%s'\n" "$variable" "${!variable}"
  done
}

node::lines() { # NAME...: a line break would end a value, and what follows it would be a variable of its own
  { local -; set +x; } 2>/dev/null
  local variable
  for variable; do
    if [[ -v "$variable" && "${!variable}" == *$'\n'* ]]; then
      printf 'dray: %s has a line break, which charliecloud cannot pass on\n  where:  node %s\n  fix:    leave it out of pass_env\n' \
        "$variable" "$(node::host)" >&2
      exit 78
    fi
  done
}

node::charliecloud() { # ENGINE KIND [NAME...]: the names are those of Slurm's task and of pass_env
  node::lines "${@:3}"
  export USER="${USER:-$(id --user --name)}" # without it ch-run does not start
  # Newer ones can make the places of mounts in an image that stays as it is; for 0.31 the image, or /tmp, must have them.
  [[ "$(ch-run --help 2>&1)" != *--write-fake* ]] || devices+=(--write-fake)
  [[ "$2" != cuda ]] || node::driver
}

node::driver() { # the driver's libraries: ch-fromhost would write them into the image; these copies go with the node's folder
  local library
  (umask 077 && mkdir --parents -- "$scratch/driver")
  while IFS= read -r library; do
    cp --dereference -- "$library" "$scratch/driver/"
  done < <(ldconfig -p | sed --quiet --regexp-extended \
    's,^\s*lib(cuda|cudadebugger|nvidia-(ml|cfg|nvvm|gpucomp|ptxjitcompiler))\.so\.[0-9.]+ \(libc6\,.* => (.*),\3,p')
  devices+=("--set-env=LD_LIBRARY_PATH=$scratch/driver")
}
