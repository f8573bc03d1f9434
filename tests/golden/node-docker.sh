#!/usr/bin/env bash
# Starts run r1 on one node. dray 0.0.0 wrote it from plan.json: change the recipe instead.
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

# dray: without it accelerate looks for GPUs
export ACCELERATE_USE_CPU=true
# dray: the cpu image cannot use GPUs that the node may have
export CUDA_VISIBLE_DEVICES=''
# dray: downloads are kept for the next run, beside the runs, on a disk that all nodes share
export HF_HOME='/shared/my work/runs/.cache-UID/huggingface'
# dray: compute nodes are offline; without it each missing file costs 48 s of retries
export HF_HUB_OFFLINE=1
# dray: matplotlib's list of fonts takes seconds to make
export MPLCONFIGDIR=/tmp/dray-7-r/matplotlib
# site harbour: the fast network
export NCCL_SOCKET_IFNAME=hsn0,hsn1
# recipe
export OMP_NUM_THREADS=1
# dray: a crash or a hang writes the stack of each thread to the rank's log
export PYTHONFAULTHANDLER=1
# dray: packages in ~/.local must not hide the image's
export PYTHONNOUSERSITE=1
# dray: a rank's last lines must be in its log when it dies
export PYTHONUNBUFFERED=1
# dray: tokenizers' threads and forked data workers deadlock
export TOKENIZERS_PARALLELISM=false
# dray: compile caches race on a shared disk
export TORCHINDUCTOR_CACHE_DIR=/tmp/dray-7-r/inductor
# dray: compile caches race on a shared disk
export TORCH_EXTENSIONS_DIR=/tmp/dray-7-r/extensions
# dray: a rank connects to 2 log2 N others as it needs them, not to all N
export TORCH_GLOO_LAZY_INIT=1
# dray: downloads are kept for the next run, beside the runs, on a disk that all nodes share
export TORCH_HOME='/shared/my work/runs/.cache-UID/torch'
# dray: tuning is kept with the compiled kernels for the next attempt
export TRITON_CACHE_AUTOTUNING=1
# dray: compile caches race on a shared disk
export TRITON_CACHE_DIR=/tmp/dray-7-r/triton
# dray: Triton's other folders, which are in the home by default
export TRITON_HOME=/tmp/dray-7-r
# dray: offline runs of Weights & Biases are kept with the run
export WANDB_DIR='/shared/my work/runs/r1'
# dray: downloads are kept for the next run, beside the runs, on a disk that all nodes share
export XDG_CACHE_HOME='/shared/my work/runs/.cache-UID'

# shellcheck disable=SC2174 # the folders above it keep the usual mode
mkdir -p -m 700 -- '/shared/my work/runs/.cache-UID' || true

number=DRAY_NODE name=DRAY_NODE_NAME read_only=readonly
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

cd '/shared/my work/runs/r1/attempt-1' || exit 69
node::bind '/shared/my work/runs/r1' rw
node::need /scratch 'site harbour: data lives there' '"rank": null, "code": 69, "why": "/scratch does not exist\n  wanted: site harbour: data lives there", "log": null, "last_lines": []'
node::bind /scratch rw
node::need '/shared/my work/runs/.cache-UID' 'dray: the caches of libraries' '"rank": null, "code": 69, "why": "/shared/my work/runs/.cache-UID does not exist\n  wanted: dray: the caches of libraries", "log": null, "last_lines": []'
node::bind '/shared/my work/runs/.cache-UID' rw
node::mounts

# Which image this node has: the first node compares it with its own.
DRAY_IMAGE_ID=$(docker image inspect '--format={{.Id}}' dray:cpu | tr --delete ' \n') || true
export DRAY_IMAGE_ID

# The fabric's devices, where this node has them.
devices=()
for device in /dev/infiniband /dev/cxi*; do
  [[ ! -e "$device" ]] || devices+=("--device=$device")
done

export DRAY_STARTED="$started"

exec docker \
  run \
  --rm \
  --init \
  --label=dray.run=r1 \
  --network=dray-r1 \
  --hostname="$DRAY_NODE_NAME" \
  --network-alias="$DRAY_NODE_NAME" \
  --user=1000:1000 \
  --shm-size=1g \
  "${devices[@]}" \
  --env=ACCELERATE_USE_CPU \
  --env=CUDA_VISIBLE_DEVICES \
  --env=HF_HOME \
  --env=HF_HUB_OFFLINE \
  --env=MPLCONFIGDIR \
  --env=NCCL_SOCKET_IFNAME \
  --env=OMP_NUM_THREADS \
  --env=PYTHONFAULTHANDLER \
  --env=PYTHONNOUSERSITE \
  --env=PYTHONUNBUFFERED \
  --env=TOKENIZERS_PARALLELISM \
  --env=TORCHINDUCTOR_CACHE_DIR \
  --env=TORCH_EXTENSIONS_DIR \
  --env=TORCH_GLOO_LAZY_INIT \
  --env=TORCH_HOME \
  --env=TRITON_CACHE_AUTOTUNING \
  --env=TRITON_CACHE_DIR \
  --env=TRITON_HOME \
  --env=WANDB_DIR \
  --env=XDG_CACHE_HOME \
  --env=DRAY_NODE \
  --env=DRAY_NODES \
  --env=DRAY_NODE_NAME \
  --env=DRAY_CPUS \
  --env=DRAY_IMAGE_ID \
  --env=DRAY_STARTED \
  "${mounts[@]}" \
  '--workdir=/shared/my work/runs/r1/attempt-1' \
  dray:cpu \
  python3 \
  -m \
  dray.runner \
  '/shared/my work/runs/r1/attempt-1/plan.json'
