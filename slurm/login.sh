#!/usr/bin/env bash
# Runs a verb of dray at a login node that has no dray: in the image, whose Python it is. `dray ... --on` starts it through ssh.
# login.sh FOLDER IMAGE RUN_IN BRING VERB [WORD...]    BRING is 1 where the verb writes a file that is wanted on standard output
# slurm/dray starts it at a login node itself: FOLDER and IMAGE are empty, the runs are where the user has them, and the image is
# the one that the words name, or any that is here.
set -euo pipefail
shopt -s extglob

source "$DRAY_HOME/slurm/job.sh"

# Slurm's programs want their own libraries, configuration and munge's socket, which differ from site to site: they run
# out here, and slurm_command.sh stands for them in the image.
readonly -a login__commands=(sbatch squeue scancel scontrol sinfo sacct sacctmgr)

# What the site files name; bash reads no TOML.
readonly -a login__of_sites=(CFS FAST MEMBERWORK MYSCRATCH MYSOFTWARE PROJECT PROJECTDIR PROJECTHOME PROJWORK PSCRATCH SCRATCH SCRATCHDIR USER WORK)

login::serve() { # answers each call, several at a time
  local call calls
  exec {calls}<>"$relay/calls" # also for writing: it never ends
  while read -r call <&"$calls"; do
    [[ "$call" != call-+([A-Za-z0-9]) ]] || login::answer "$relay/$call" &
  done
}

login::answer() { # FOLDER
  local -a argv=()
  local code=0
  mapfile -d '' -t argv <"$1/argv"
  { # whatever fails, the program in the image waits for the code
    [[ " ${login__commands[*]} " == *" ${argv[0]} "* ]] && cd -- "${argv[1]}" && SLURM_TIME_FORMAT=standard "${argv[0]}" "${argv[@]:2}"
  } >"$1/out" 2>"$1/err" </dev/null || code=$?
  printf '%s\n' "$code" >"$1/code"
}

login::here() { # VERB [WORD...]: sets `words`, a SIF by its whole path; `image`; and the `folders` that it needs
  local word before=""
  words=()
  while (($#)) && [[ "$1" != -- ]]; do # what follows is the command's own
    words+=("$(job::setting "$1")")
    [[ -n "$recipe" || "$1" != *.toml || ! -f "$1" || "$before" == --site ]] || recipe="$1"
    before="$1"
    shift
  done
  image="$(plan::guess "${words[@]}")"
  folders=("$runs" "$where" "$image")
  for word in "$DRAY_HOME"/build/dray-*/source "$runs"/.adopted/dray-*/source; do
    [[ ! -e "$word" ]] || folders+=("$(readlink -- "$word")")
  done
  ! adopt::is "$image" || [[ " ${words[*]} " != *" adopted="* && -z "$recipe" ]] || given_image="$image"
  words+=("$@")
}

login::main() { # FOLDER IMAGE RUN_IN BRING VERB [WORD...]
  local -r folder="$1" bring="$4" own_sites="${DRAY_SITES:-${XDG_CONFIG_HOME:-${HOME:-}/.config}/dray/sites}"
  local where="$3" image="$2" given_image="${2:-${DRAY_IMAGE:-}}" runs="$1/runs" recipe="" engine word
  local -a folders=("$1") words=("${@:5}") files
  relay="" made="" server=""
  engine="$(type -P apptainer || type -P singularity)" || job::die 69 "there is neither apptainer nor singularity on login node $(</proc/sys/kernel/hostname)" \
    "where:  PATH=$PATH" "fix:    load the site's module in your ~/.bash_profile there"
  engine="${engine##*/}"
  engine::forget
  job::hub
  trap '[[ -z "$server" ]] || kill -- "-$server" 2>/dev/null || true; rm -rf -- "$relay" "$made"' EXIT
  # A folder of this user's: bin/ has a program for each of Slurm's that is here.
  relay="$(mktemp -d -- "${TMPDIR:-/tmp}/dray-relay-XXXXXX")"
  mkdir -- "$relay/bin"
  mkfifo -- "$relay/calls"
  for word in "${login__commands[@]}"; do
    ! command -v "$word" >/dev/null || ln --symbolic -- "$DRAY_HOME/slurm/slurm_command.sh" "$relay/bin/$word"
  done
  if [[ -z "$folder" ]]; then
    exec </dev/null # no connection ends here, and Ctrl-C reaches the verb itself
    runs="$(realpath -m -- "${DRAY_RUNS:-runs}")"
    login::here "${@:5}"
  elif [[ "$bring" == 1 ]]; then
    made="$(mktemp -d -- "$folder/.made-XXXXXX")"
    where="$made"
  fi
  job::runs "$runs"
  folders+=("$DRAY_HOME" "$relay")
  for word in "${words[@]#*=}"; do
    [[ -z "$folder" || "$word" == /* && "$word" != "$folder"/* ]] || continue
    # A recipe's folder has what the recipe names, and a new file's folder is written.
    [[ "$word" != *.toml && (-e "$word" || "$word" != */*) ]] || word="$(dirname -- "$word")"
    [[ ! -e "$word" || "$(realpath -- "$word")" == / ]] || folders+=("$(realpath -s -- "$word")")
  done
  # What a plan at a login node looks at.
  local -a verb=(env "DRAY_SLURM=$relay/bin" "DRAY_RUNS=$runs" "DRAY_IMAGE=$given_image" "TERM=dumb")
  for word in HF_HOME DRAY_SITE SLURM_CLUSTER_NAME SBATCH_{ACCOUNT,PARTITION} "${login__of_sites[@]}"; do
    [[ -z "${!word:-}" ]] || verb+=("$word=${!word}")
  done
  verb+=(python3 -m dray "${words[@]}")
  set -m
  login::serve </dev/null >/dev/null 2>&1 &
  server=$!
  set +m
  if [[ -z "$made" ]]; then
    engine::inside "${verb[@]}"
  else
    engine::inside "${verb[@]}" >/dev/null
    files=("$made"/*)
    [[ -f "${files[0]}" ]] || job::die 1 "the command has written no file" "where:  $made" "found:  no file; the lines above say more"
    printf '%s\n' "${files[0]##*/}"
    cat -- "${files[0]}"
  fi
}

login::main "$@"
