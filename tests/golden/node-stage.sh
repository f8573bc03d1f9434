#!/usr/bin/env bash
# Starts run r on one node. dray 0 wrote it from plan.json: change the recipe instead.
set -euo pipefail

# When each part of this node's start began, by a clock that nobody sets: the runner makes durations of them. node.sh
# contains this file.

node::now() { # NAME
  local now
  { read -r now _ </proc/uptime; } 2>/dev/null || return 0
  started+=" $1=$now"
}

{ read -r started </proc/sys/kernel/random/boot_id; } 2>/dev/null || started=""
started="boot=$started step=${SLURM_STEP_ID:-} ${DRAY_ASKED:-}"
node::now began

# The engine would pass these on too, and no plan would show them.
unset "${!APPTAINERENV_@}" "${!SINGULARITYENV_@}"
unset {APPTAINER,SINGULARITY}_{BIND,BINDPATH,MOUNT,CONTAINLIBS}

# dray: without it accelerate looks for GPUs
export APPTAINERENV_ACCELERATE_USE_CPU=true
# dray: the cpu image cannot use GPUs that the node may have
export APPTAINERENV_CUDA_VISIBLE_DEVICES=''
# dray: downloads are kept for the next run, beside the runs, on a disk that all nodes share
export APPTAINERENV_HF_HOME=/runs/.cache-UID/huggingface
# dray: compute nodes are offline; without it each missing file costs 48 s of retries
export APPTAINERENV_HF_HUB_OFFLINE=1
# dray: matplotlib's list of fonts takes seconds to make
export APPTAINERENV_MPLCONFIGDIR=/tmp/dray-7-r/matplotlib
# recipe
export APPTAINERENV_OMP_NUM_THREADS=1
# dray: a crash or a hang writes the stack of each thread to the rank's log
export APPTAINERENV_PYTHONFAULTHANDLER=1
# dray: packages in ~/.local must not hide the image's
export APPTAINERENV_PYTHONNOUSERSITE=1
# dray: a rank's last lines must be in its log when it dies
export APPTAINERENV_PYTHONUNBUFFERED=1
# dray: tokenizers' threads and forked data workers deadlock
export APPTAINERENV_TOKENIZERS_PARALLELISM=false
# dray: compile caches race on a shared disk
export APPTAINERENV_TORCHINDUCTOR_CACHE_DIR=/tmp/dray-7-r/inductor
# dray: compile caches race on a shared disk
export APPTAINERENV_TORCH_EXTENSIONS_DIR=/tmp/dray-7-r/extensions
# dray: a rank connects to 2 log2 N others as it needs them, not to all N
export APPTAINERENV_TORCH_GLOO_LAZY_INIT=1
# dray: downloads are kept for the next run, beside the runs, on a disk that all nodes share
export APPTAINERENV_TORCH_HOME=/runs/.cache-UID/torch
# dray: tuning is kept with the compiled kernels for the next attempt
export APPTAINERENV_TRITON_CACHE_AUTOTUNING=1
# dray: compile caches race on a shared disk
export APPTAINERENV_TRITON_CACHE_DIR=/tmp/dray-7-r/triton
# dray: Triton's other folders, which are in the home by default
export APPTAINERENV_TRITON_HOME=/tmp/dray-7-r
# dray: offline runs of Weights & Biases are kept with the run
export APPTAINERENV_WANDB_DIR=/runs/r
# dray: downloads are kept for the next run, beside the runs, on a disk that all nodes share
export APPTAINERENV_XDG_CACHE_HOME=/runs/.cache-UID

scratch=/tmp/dray-7-r
# Starts the engine and ends with its exit code. node.sh contains this file; `scratch` is the run's folder on this node.
# shellcheck disable=SC2154

readonly node__grace_s=10 # from SIGTERM to SIGKILL

node::start() { # COMMAND...
  local engine="" early="" heard code
  for heard in TERM INT HUP USR1; do
    # shellcheck disable=SC2064 # now, not then
    trap "node::heard $heard" "$heard"
  done
  # The engine has a process group of its own, and a signal that this script gets (Slurm may signal it alone) goes to its
  # first process, once: beside it in the group is what has mounted the image, without which ranks die of SIGBUS.
  set -m
  "$@" &
  engine=$!
  set +m
  [[ -z "$early" ]] || node::heard "$early"
  while :; do # a signal ends the wait, and not the engine
    code=0
    wait "$engine" || code=$?
    kill -0 "$engine" 2>/dev/null || break
  done
  wait "$engine" || code=$?
  node::sweep
  exit "$code"
}

# shellcheck disable=SC2317 # a trap calls it
node::heard() { # SIGNAL
  early="$1"
  [[ -z "$engine" ]] || kill "-$1" "$engine" 2>/dev/null || true
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

node::left() { # the processes that have the run's folder on this node in their environment, but what looks for them
  local file
  for file in $(cd /proc && grep --files-with-matches --null-data --no-messages "=$scratch\(/.*\)\?$" [0-9]*/environ); do
    [[ ! -e "/proc/$file" ]] || echo "${file%/environ}"
  done
}

# shellcheck disable=SC2317 # the trap calls it
node::clean() { # what was compiled on this node goes when it has ended, and a staged image
  ! declare -F node::unstage >/dev/null || node::unstage
  rm -rf -- "$scratch"
}
trap node::clean EXIT

# shellcheck disable=SC2174 # the folders above it keep the usual mode
mkdir -p -m 700 -- /runs/.cache-UID || true

number=SLURM_NODEID name=SLURMD_NODENAME read_only=ro
# What a node must have, and what the container sees of it. node.sh contains this file, after the data that it reads:
# `number` and `name` are the names of the variables with this node's number and name, `read_only` is the engine's word.
# shellcheck disable=SC2154,SC2034

declare -a binds=() mounts=()

node::unfit() { # PATH WANTED RECORD: the record is what the runner writes, once the container has started
  printf 'dray: %s does not exist\n  wanted: %s\n  where:  node %s\n' "$1" "$2" "$(node::host)" >&2
  node::record "$3"
}

node::host() { echo "${!name:-$(</proc/sys/kernel/hostname)}"; }

node::record() { # RECORD: and the end of this node
  local -r record="failures/node-${!number:-unknown}.json"
  # A disk that is full must not hide the exit code as well.
  if printf '{"time": %s, "node": "%s", %s}\n' "$(date +%s.%N)" "$(node::host)" "$1" >"$record.part"; then
    mv -- "$record.part" "$record"
  fi || true
  exit 69
}

node::need() { # PATH WANTED RECORD
  [[ -e "$1" ]] || node::unfit "$@"
}

node::bind() { # PATH ro|rw: also where a link leads to, since programs ask for a file's real path
  local path real
  real="$(realpath -- "$1"; echo .)" # the dot keeps what a line break at the end would lose
  for path in "$1" "${real%$'\n.'}"; do
    binds+=("$path"$'\t'"$2")
  done
}

node::mounts() { # fills `mounts`, the options that the engine gets
  local entry path last=""
  # A folder before what lies in it: the last mount is the one that is seen. Who may write decides.
  while IFS= read -r -d '' entry; do
    path="${entry%$'\t'*}"
    [[ "$path" != "$last" ]] || unset 'mounts[-1]'
    node::option "$path" "${entry##*$'\t'}"
    last="$path"
  done < <(printf '%s\0' "${binds[@]}" | LC_ALL=C sort --zero-terminated --unique)
}

# The option of Apptainer, Docker and Podman for a mount. node.sh contains this file after places.sh.
# shellcheck disable=SC2154,SC2034

node::option() { # PATH ro|rw: as CSV, so that commas and quotes in it survive
  local -r quoted="${1//\"/\"\"}"
  local mode=""
  [[ "$2" == rw ]] || mode=",$read_only"
  mounts+=("--mount=type=bind,\"src=$quoted\",\"dst=$quoted\"$mode")
}

cd /runs/r/attempt-1 || exit 69
node::need '/my images/i.sif' 'the image' '"rank": null, "code": 69, "why": "/my images/i.sif does not exist\n  wanted: the image", "log": null, "last_lines": []'
node::bind /runs/r rw
node::need /runs/.cache-UID 'dray: the caches of libraries' '"rank": null, "code": 69, "why": "/runs/.cache-UID does not exist\n  wanted: dray: the caches of libraries", "log": null, "last_lines": []'
node::bind /runs/.cache-UID rw
node::mounts

# Which image this node has: the first node compares it with its own.
DRAY_IMAGE_ID=$(od --address-radix=n --format=x1 --skip-bytes=48 --read-bytes=16 '/my images/i.sif' | tr --delete ' \n') || true
export DRAY_IMAGE_ID

# Only the node knows these: its own identity, Slurm's task, and what pass_env names.
# Where bash traces (SHELLOPTS=xtrace), the log would show the values.
{ traced=$-; set +x; } 2>/dev/null
for variable in SLURM_NODEID SLURM_STEP_NUM_NODES SLURMD_NODENAME SLURM_CPUS_ON_NODE DRAY_IMAGE_ID SLURM_ARRAY_JOB_ID SLURM_ARRAY_TASK_COUNT SLURM_ARRAY_TASK_ID SLURM_CLUSTER_NAME SLURM_CPUS_PER_TASK SLURM_GPUS_ON_NODE SLURM_JOBID SLURM_JOB_ACCOUNT SLURM_JOB_CPUS_PER_NODE SLURM_JOB_END_TIME SLURM_JOB_ID SLURM_JOB_NAME SLURM_JOB_NODELIST SLURM_JOB_NUM_NODES SLURM_JOB_PARTITION SLURM_JOB_START_TIME SLURM_JOB_USER SLURM_LAUNCH_NODE_IPADDR SLURM_LOCALID SLURM_NNODES SLURM_NODELIST SLURM_NPROCS SLURM_NTASKS SLURM_NTASKS_PER_NODE SLURM_PROCID SLURM_RESTART_COUNT SLURM_STEP_NODELIST SLURM_STEP_NUM_TASKS SLURM_STEP_TASKS_PER_NODE SLURM_SUBMIT_DIR SLURM_TASKS_PER_NODE; do
  [[ ! -v "$variable" ]] || export "APPTAINERENV_$variable=${!variable}"
done
[[ "$traced" != *x* ]] || set -x

node::now staging

image_id="${DRAY_IMAGE_ID}"
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

# The image is copied to this node's own disk once, for all jobs of this user that run here, and goes with the last one.
# node.sh contains this file after disk.sh.
# shellcheck disable=SC2154,SC2034

copied="" part=""

node::stage() { # IMAGE FOLDER SHA256: sets `image`; it stays the shared one where there is no room
  local copy="" found making
  image="$1"
  [[ -f "$1" ]] || return 0 # a folder starts where it is
  if node::disk "$@" && ! { node::join && { exec {making}>>"$copy.making"; } 2>/dev/null; }; then
    node::full "$1"
    copy=""
  fi
  # Where sbcast has brought it to all nodes, there is nothing to bring.
  ! declare -F node::tree >/dev/null || [[ -n "${DRAY_STAGED:-}" ]] || node::tree "$1" "$3"
  [[ -n "$copy" ]] || return 0
  flock --exclusive "$making"
  if [[ ! -f "$copy" ]]; then
    part="$copy.part"
    if ! found="$(set -o pipefail; tee -- "$part" <"$1" | sha256sum)"; then
      rm --force -- "$part"
      part="" # from here on it may be another job's, which may find room
      exec {making}>&-
      node::full "$1"
      return 0
    fi
    if [[ -n "$3" && "${found%% *}" != "$3" ]]; then
      rm --force -- "$part"
      node::differs "${found%% *}" "$3"
      exit 69
    fi
    mv -- "$part" "$copy"
    part=""
  fi
  exec {making}>&-
  image="$copy" copied="$copy"
}

node::full() { # IMAGE
  echo "dray: no room for a copy of the image in ${copy%/*}: it is read from $1" >&2
}

# shellcheck disable=SC2317 # node::clean calls it
node::unstage() {
  [[ -z "$part" ]] || rm --force -- "$part" # of a copy that was broken off
  if [[ -n "$copied" ]] && flock --exclusive --nonblock "$staged"; then
    rm --force -- "$copied" "$copied.making" "$copied.lock"
  fi
}

node::fetch() {
  apptainer \
    --quiet \
    exec \
    --cleanenv \
    --no-eval \
    --no-mount=home,cwd \
    "${mounts[@]}" \
    --pwd=/runs/r/attempt-1 \
    '/my images/i.sif' \
    python3 \
    -m \
    dray.runner.stage \
    /runs/r/attempt-1/plan.json
}

# The image comes from node to node, from the first one, which reads it. node.sh contains this file after stage.sh, and defines
# node::fetch, which runs dray.runner.stage in a container of the shared image.
# shellcheck disable=SC2154,SC2034

node::tree() { # IMAGE SHA256: makes `copy`, or leaves it to what comes next; every node takes part, for all wait for one another
  local found
  if [[ -z "$copy" ]] || ! flock --exclusive --nonblock "$making"; then # a node that has the lock must not wait for another lock
    node::fetch <"$1" >/dev/null || true
  elif [[ -f "$copy" ]]; then
    node::fetch <"$copy" >/dev/null || true
  else
    part="$copy.part"
    rm --force -- "$part" # of a job that was killed
    if node::fetch <"$1" 1<>"$part" && found="$(sha256sum <"$part")"; then
      if [[ "${found%% *}" == "$2" ]]; then
        chmod 600 -- "$part"
        mv -- "$part" "$copy"
      else
        node::differs "${found%% *}" "$2"
      fi
    fi
    rm --force -- "$part"
    part=""
  fi
}

node::stage '/my images/i.sif' '/local disk' 5ec2e75ec2e75ec2e75ec2e75ec2e75ec2e75ec2e75ec2e75ec2e75ec2e70000

node::now staged

export APPTAINERENV_DRAY_STARTED="$started"

node::start apptainer \
  --quiet \
  exec \
  --cleanenv \
  --no-eval \
  --no-mount=home,cwd \
  "${mounts[@]}" \
  --pwd=/runs/r/attempt-1 \
  "$image" \
  python3 \
  -m \
  dray.runner \
  /runs/r/attempt-1/plan.json
