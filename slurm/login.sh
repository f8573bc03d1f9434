#!/usr/bin/env bash
# Runs a verb of dray at a login node that has no dray: in the image, whose Python it is. `dray ... --on` starts it through ssh.
# login.sh FOLDER IMAGE RUN_IN BRING VERB [WORD...]    BRING is 1 where the verb writes a file that is wanted on standard output
# slurm/dray starts it too, at a login node itself: FOLDER and IMAGE are empty, the runs are where the user has them, and the
# image is the one that the words name, or any that is here.
set -euo pipefail
shopt -s extglob

if [[ -n "$1" ]]; then # not what this user has set for other uses
  DRAY_HOME="$(realpath -- "${BASH_SOURCE[0]}")"
  DRAY_HOME="${DRAY_HOME%/slurm/login.sh}"
fi
# shellcheck source=slurm/lib.sh
source "$DRAY_HOME/slurm/lib.sh"

# Slurm's programs want their own libraries, configuration and munge's socket, which differ from site to site: they run
# out here, and the image gets a door to them.
readonly -a login__commands=(sbatch squeue scancel scontrol sinfo sacct sacctmgr)

# What the site files name; bash reads no TOML.
readonly -a login__of_sites=(CFS FAST MEMBERWORK MYSCRATCH MYSOFTWARE PROJECT PROJECTDIR PROJECTHOME PROJWORK PSCRATCH SCRATCH SCRATCHDIR USER WORK)

login::door() { # sets `door`, a folder of this user's: bin/ has a program for each of Slurm's that is here
  local name
  door="$(mktemp -d -- "${TMPDIR:-/tmp}/dray-door-XXXXXX")"
  mkdir -- "$door/bin"
  mkfifo -- "$door/calls"
  for name in "${login__commands[@]}"; do
    ! command -v "$name" >/dev/null || ln --symbolic -- "$DRAY_HOME/slurm/door.sh" "$door/bin/$name"
  done
}

login::serve() { # answers each call, several at a time
  local call calls
  exec {calls}<>"$door/calls" # also for writing: it never ends
  while read -r call <&"$calls"; do
    [[ "$call" != call-+([A-Za-z0-9]) ]] || login::answer "$door/$call" &
  done
}

login::answer() { # FOLDER
  local -a argv=()
  local code=0 name
  mapfile -d '' -t argv <"$1/argv"
  for name in "${login__commands[@]}"; do
    [[ "$name" != "${argv[0]}" ]] || break
    name=""
  done
  { # whatever fails, the door waits for the code
    cd -- "${argv[1]}" && SLURM_TIME_FORMAT=standard "${name:-false}" "${argv[@]:2}"
  } >"$1/out" 2>"$1/err" </dev/null || code=$?
  printf '%s\n' "$code" >"$1/code"
}

login::here() { # VERB [WORD...]: sets `runs`, `image`, `given_image`, `folders` and `words`, a SIF by its whole path
  local word
  runs="$(realpath -m -- "${DRAY_RUNS:-runs}")"
  for word in "$@"; do
    words+=("$(lib::setting "$word")")
    [[ -n "$recipe" || "$word" != *.toml || ! -f "$word" ]] || recipe="$word"
  done
  image="$(plan::guess "${words[@]}")" || {
    code=$?
    echo "          or slurm/dray image adopt FILE; a job with adopted=FILE does it too: until then squeue shows the job" >&2
    exit "$code"
  }
  folders=("$DRAY_HOME" "$runs" "$where" "$image")
  for word in "$DRAY_HOME"/build/dray-*/source "$runs"/.adopted/dray-*/source; do
    [[ ! -e "$word" ]] || folders+=("$(readlink -- "$word")")
  done
  for word in "${words[@]#*=}"; do # a recipe's folder has what the recipe names
    # And a new file's folder is written.
    [[ "$word" != *.toml && (-e "$word" || "$word" != */*) ]] || word="$(dirname -- "$word")"
    [[ ! -e "$word" || "$(realpath -- "$word")" == / ]] || folders+=("$(realpath -s -- "$word")")
  done
  ! adopt::is "$image" || [[ " ${words[*]} " != *" adopted="* && "$recipe" == "" ]] || given_image="$image"
}

login::end() {
  [[ -z "$server" ]] || kill -- "-$server" 2>/dev/null || true
  rm -rf -- "$door" "$made"
}

login::brought() { # the one file that the verb has written: its name, and then its bytes
  local -a found=("$made"/*)
  [[ ${#found[@]} == 1 && -f "${found[0]}" ]] || lib::die 1 "the command has written no file" "where:  $made"
  printf '%s\n' "${found[0]##*/}"
  cat -- "${found[0]}"
}

login::main() { # FOLDER IMAGE RUN_IN BRING VERB [WORD...]
  local -r folder="$1" bring="$4" own_sites="${DRAY_SITES:-${XDG_CONFIG_HOME:-${HOME:-}/.config}/dray/sites}"
  local where="$3" image="$2" given_image="${2:-${DRAY_IMAGE:-}}" runs="$1/runs" recipe="" engine word code=0 open
  local -a folders=("$1") words=()
  door="" made="" server=""
  shift 4
  engine="$(type -P apptainer || type -P singularity)" || lib::die 69 "there is neither apptainer nor singularity on login node $(</proc/sys/kernel/hostname)" \
    "where:  PATH=$PATH" "fix:    load the site's module in your ~/.bash_profile there"
  engine="${engine##*/}"
  [[ "$1" != submit ]] || command -v sbatch >/dev/null || lib::die 69 "there is no sbatch on $(</proc/sys/kernel/hostname)" \
    "where:  PATH=$PATH" "fix:    name a login node of the cluster, or load its module in your ~/.bash_profile there"
  engine::forget
  unset "${!SQUEUE_@}" # squeue would hide jobs
  lib::hub
  trap login::end EXIT
  login::door
  [[ "$bring" != 1 ]] || made="$(mktemp -d -- "$folder/.made-XXXXXX")"
  where="${made:-$where}"
  if [[ -z "$folder" ]]; then
    login::here "$@"
    set -- "${words[@]}"
  fi
  mkdir -p -- "$runs"
  folders+=("$door")
  for word in "$DRAY_HOME" "$own_sites" "${HF_HOME:-}" "${@#--*=}"; do
    [[ "$word" != /?* || ! -d "$word" || -n "$folder" && "$word/" == "$folder/"* ]] || folders+=("$(realpath -s -- "$word")")
  done
  # What a plan at a login node looks at.
  local -a environment=("DRAY_RUNS=$runs" "DRAY_IMAGE=$given_image" "TERM=dumb")
  for word in HF_HOME DRAY_SITE SLURM_CLUSTER_NAME SBATCH_{ACCOUNT,PARTITION} "${login__of_sites[@]}"; do
    [[ -z "${!word:-}" ]] || environment+=("$word=${!word}")
  done
  set -m
  login::serve </dev/null >/dev/null 2>&1 &
  server=$!
  set +m
  local -ra verb=(env "${environment[@]}" bash "$DRAY_HOME/slurm/verb.sh" "$door/bin" "$@")
  if [[ -z "$folder" ]]; then # nobody's connection ends; Ctrl-C ends this script, and so the verb's input, which it alone holds open
    mkfifo -- "$door/open"
    exec {open}<>"$door/open"
    (exec {open}>&-; engine::inside "${verb[@]}") <"$door/open" || code=$?
  elif [[ -z "$made" ]]; then
    engine::inside "${verb[@]}" || code=$?
  else
    engine::inside "${verb[@]}" >/dev/null || code=$?
    ((code != 0)) || login::brought
  fi
  return "$code"
}

login::main "$@"
