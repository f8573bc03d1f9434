#!/usr/bin/env bash
# Run r1 on one node. dray 0.0.0 wrote it from plan.json: change the recipe instead.
set -euo pipefail

# When each part of this node's start began, by a clock that nobody sets: the runner makes durations of them. node.sh
# contains this file.

node::now() { # NAME
  local now
  { read -r now _ </proc/uptime; } 2>/dev/null || return 0
  started+=" $1=$now"
}

{ read -r started </proc/sys/kernel/random/boot_id; } 2>/dev/null || started=""
started="boot=$started ${DRAY_ASKED:-}"
node::now began

# The engine would pass these on too, and no plan would show them.
unset "${!APPTAINERENV_@}" "${!SINGULARITYENV_@}"
unset {APPTAINER,SINGULARITY}_{BIND,BINDPATH,MOUNT,CONTAINLIBS}

# plan.json says who has set them, and why.
export APPTAINERENV_PYTHONFAULTHANDLER=1
export APPTAINERENV_PYTHONNOUSERSITE=1
export APPTAINERENV_PYTHONUNBUFFERED=1

scratch=/tmp/dray-7-r copy=''
# Starts the engine and ends with its exit code. node.sh contains this file; `scratch` is the run's folder on this node, and
# `copy` sbcast's copy of the image.
# shellcheck disable=SC2154

readonly node__grace_s=10 # from SIGTERM to SIGKILL

node::start() { # COMMAND...
  local engine="" early="" heard code=0 started
  local -a own words
  for heard in TERM INT HUP USR1; do
    # shellcheck disable=SC2064 # now, not then
    trap "node::heard $heard" "$heard"
  done
  # The engine has a process group of its own, and a signal that this script gets (Slurm may signal it alone) goes to its
  # first process, once: beside it in the group is what has mounted the image, without which ranks die of SIGBUS.
  set -m
  "$@" &
  started=$!
  set +m
  # Until the child is the engine, it is a copy of this bash, whose handler would take a signal that nobody looks at later.
  mapfile -d '' -t own </proc/$$/cmdline
  words=("${own[@]}")
  while [[ "${words[*]}" == "${own[*]}" ]]; do
    sleep 0.01 # the disk with the engine's program may be slow
    words=()
    mapfile -d '' -t words <"/proc/$started/cmdline" || true # it has ended
  done 2>/dev/null
  engine=$started
  [[ -z "$early" ]] || node::heard "$early"
  while kill -0 "$engine" 2>/dev/null; do # a signal ends the wait, and not the engine
    wait "$engine" || true
  done
  wait "$engine" || code=$?
  node::sweep
  exit "$code"
}

# shellcheck disable=SC2317 # a trap calls it
node::heard() { # SIGNAL
  [[ -n "$engine" ]] || { early="$1"; return 0; } # without a number it would be that of what the signal interrupted
  kill "-$1" "$engine" 2>/dev/null || true
}

# Nothing of the run outlives this script. The runner has ended all, unless it was killed, as by a scancel: Slurm signals
# every process of the job, also what has mounted the image.
node::sweep() {
  local asked=" " until=$((SECONDS + node__grace_s)) process
  local -a left=()
  while mapfile -t left < <(node::left) && ((${#left[@]} > 0 && SECONDS < until + node__grace_s)); do
    for process in "${left[@]}"; do
      if ((SECONDS >= until)); then
        kill -KILL "$process" 2>/dev/null || true
      elif [[ "$asked" != *" $process "* ]]; then
        kill -TERM "$process" 2>/dev/null || true
        asked+="$process "
      fi
    done
    sleep 0.2
  done
}

# The processes with the run's folder on this node in their environment (DRAY_HEARTBEATS), but what looks for them.
node::left() {
  local file
  for file in $(cd /proc && grep --files-with-matches --null-data --no-messages "=$scratch\(/.*\)\?$" [0-9]*/environ); do
    [[ ! -e "/proc/$file" ]] || echo "${file%/environ}"
  done
}

# What was compiled on this node goes when it has ended, and sbcast's copy of the image.
trap 'rm -rf -- "$scratch" ${copy:+"$copy"} || true' EXIT

# shellcheck disable=SC2174 # the folders above it keep the usual mode
mkdir -p -m 700 -- '/shared/my work/runs/.cache-UID' || true

number=SLURM_NODEID name=SLURMD_NODENAME read_only=ro
# What a node must have, and what the container sees of it. node.sh contains this file, after the data that it reads:
# `number` and `name` are the names of the variables with this node's number and name, `read_only` is the engine's word.
# shellcheck disable=SC2154,SC2034

declare -a binds=() mounts=()

node::host() { echo "${!name:-$(</proc/sys/kernel/hostname)}"; }

node::record() { # WHY, as JSON: what the runner would write, had the container started; and the end of this node
  local -r record="failures/node-${!number:-unknown}.json"
  # A disk that is full must not hide the exit code as well.
  printf '{"time": %s, "node": "%s", "rank": null, "code": 69, "why": %s, "log": null, "last_lines": []}\n' \
    "$(date +%s.%N)" "$(node::host)" "$1" >"$record.part" || exit 69
  mv -- "$record.part" "$record" || true
  exit 69
}

node::unfit() { # PATH WANTED WHY
  printf 'dray: %s does not exist\n  wanted: %s\n  where:  node %s\n' "$1" "$2" "$(node::host)" >&2
  node::record "$3"
}

node::need() { # PATH WANTED WHY
  [[ -e "$1" ]] || node::unfit "$@"
}

# shellcheck disable=SC2317 # only a node with an adopted image calls it
node::same() { # FILE WANTED WHY: an adopted image is used where it is, and its owner may have changed it
  local found
  found="$(stat --dereference --format='owner %u, inode %i, %s bytes, changed %.9Y' -- "$1" 2>&1)" || true
  [[ "$found" == "$2" ]] && return
  printf 'dray: %s was changed since it was adopted\n  where:  node %s\n  wanted: %s\n  found:  %s\n' \
    "$1" "$(node::host)" "$2" "$found" >&2
  node::record "$3"
}

node::bind() { # PATH ro|rw: also where a link leads to, since programs ask for a file's real path
  local path real
  real="$(realpath -- "$1"; echo .)" # the dot keeps what a line break at the end would lose
  for path in "$1" "${real%$'\n.'}"; do
    binds+=("$path"$'\t'"$2")
  done
}

node::mounts() { # fills `mounts`, the engine's options, as CSV, so that commas and quotes in a path survive
  local entry path quoted mode last=""
  # A folder before what lies in it: the last mount is the one that is seen. Who may write decides.
  while IFS= read -r -d '' entry; do
    path="${entry%$'\t'*}" mode=",$read_only"
    [[ "$entry" != *$'\trw' ]] || mode=""
    [[ "$path" != "$last" ]] || unset 'mounts[-1]'
    last="$path" quoted="${path//\"/\"\"}"
    mounts+=("--mount=type=bind,\"src=$quoted\",\"dst=$quoted\"$mode")
  done < <(printf '%s\0' "${binds[@]}" | LC_ALL=C sort --zero-terminated --unique)
}

cd '/shared/my work/runs/r1/attempt-1' || exit 69
node::need '/shared/my work/build/dray-cpu.sif' 'the image' '"/shared/my work/build/dray-cpu.sif does not exist\n  wanted: the image"'
node::bind '/shared/my work/runs/r1' rw
node::need /scratch 'site harbour: data lives there' '"/scratch does not exist\n  wanted: site harbour: data lives there"'
node::bind /scratch rw
node::need '/shared/my work/runs/.cache-UID' 'dray: the caches of libraries' '"/shared/my work/runs/.cache-UID does not exist\n  wanted: dray: the caches of libraries"'
node::bind '/shared/my work/runs/.cache-UID' rw
node::mounts

# Which image this node has: the first node compares it with its own.
DRAY_IMAGE_ID=$(od --address-radix=n --format=x1 --skip-bytes=48 --read-bytes=16 '/shared/my work/build/dray-cpu.sif' | tr --delete ' \n') || true
export DRAY_IMAGE_ID

# Only the node knows these: its own identity, Slurm's task, and what pass_env names.
# Where bash traces (SHELLOPTS=xtrace), the log would show the values.
{ traced=$-; set +x; } 2>/dev/null
for variable in SLURM_NODEID SLURM_STEP_NUM_NODES SLURMD_NODENAME SLURM_CPUS_ON_NODE DRAY_IMAGE_ID SLURM_ARRAY_JOB_ID SLURM_ARRAY_TASK_COUNT SLURM_ARRAY_TASK_ID SLURM_CLUSTER_NAME SLURM_CPUS_PER_TASK SLURM_GPUS_ON_NODE SLURM_JOBID SLURM_JOB_ACCOUNT SLURM_JOB_CPUS_PER_NODE SLURM_JOB_END_TIME SLURM_JOB_ID SLURM_JOB_NAME SLURM_JOB_NODELIST SLURM_JOB_NUM_NODES SLURM_JOB_PARTITION SLURM_JOB_START_TIME SLURM_JOB_USER SLURM_LAUNCH_NODE_IPADDR SLURM_LOCALID SLURM_NNODES SLURM_NODELIST SLURM_NPROCS SLURM_NTASKS SLURM_NTASKS_PER_NODE SLURM_PROCID SLURM_RESTART_COUNT SLURM_STEP_NODELIST SLURM_STEP_NUM_TASKS SLURM_STEP_TASKS_PER_NODE SLURM_SUBMIT_DIR SLURM_TASKS_PER_NODE; do
  [[ ! -v "$variable" ]] || export "APPTAINERENV_$variable=${!variable}"
done
[[ "$traced" != *x* ]] || set -x

export APPTAINERENV_DRAY_STARTED="$started" APPTAINERENV_DRAY_HEARTBEATS=/tmp/dray-7-r

node::start apptainer \
  --quiet \
  exec \
  --cleanenv \
  --no-eval \
  --no-mount=home,cwd \
  "${mounts[@]}" \
  '--pwd=/shared/my work/runs/r1/attempt-1' \
  '/shared/my work/build/dray-cpu.sif' \
  python3 \
  -m \
  dray.runner \
  '/shared/my work/runs/r1/attempt-1/plan.json'
