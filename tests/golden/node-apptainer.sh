#!/usr/bin/env bash
# Starts run r1 on one node. dray 0.0.0 rendered it from plan.json: change the recipe, not it.
set -euo pipefail

# The engine would hand these in as well, and no plan would show them.
unset "${!APPTAINERENV_@}" "${!SINGULARITYENV_@}"
unset {APPTAINER,SINGULARITY}_{BIND,BINDPATH,MOUNT,CONTAINLIBS}

# dray: else accelerate looks for GPUs
export APPTAINERENV_ACCELERATE_USE_CPU=true
# dray: the cpu image has no use for GPUs that the node may have
export APPTAINERENV_CUDA_VISIBLE_DEVICES=''
# dray: offline, a missing name costs 48 s of retries; compute nodes are offline
export APPTAINERENV_HF_HUB_OFFLINE=1
# site harbour: the fast network
export APPTAINERENV_NCCL_SOCKET_IFNAME=hsn0,hsn1
# recipe
export APPTAINERENV_OMP_NUM_THREADS=1
# dray: packages in ~/.local must not beat the image's
export APPTAINERENV_PYTHONNOUSERSITE=1
# dray: a rank's last lines must be in its log when it dies
export APPTAINERENV_PYTHONUNBUFFERED=1
# dray: tokenizers' threads and forked data workers deadlock
export APPTAINERENV_TOKENIZERS_PARALLELISM=false
# dray: compile caches race on a shared disk
export APPTAINERENV_TORCHINDUCTOR_CACHE_DIR=/tmp/dray-r1/inductor
# dray: compile caches race on a shared disk
export APPTAINERENV_TORCH_EXTENSIONS_DIR=/tmp/dray-r1/extensions
# dray: compile caches race on a shared disk
export APPTAINERENV_TRITON_CACHE_DIR=/tmp/dray-r1/triton

# An engine's own words about a missing place are hard to read.
unfit() { # PLACE WANTED RECORD
  local -r node="${SLURMD_NODENAME:-$(</proc/sys/kernel/hostname)}"
  printf 'dray: %s is not there\n  wanted: %s\n  where:  node %s\n' "$1" "$2" "$node" >&2
  local -r record="failures/node-${SLURM_NODEID:-unknown}.json"
  # A disk that is full must not hide the exit code as well.
  if printf '{"time": %s, "node": "%s", %s}\n' "$(date +%s.%N)" "$node" "$3" >"$record.part"; then
    mv -- "$record.part" "$record"
  fi || true
  exit 69
}
need() { # PLACE WANTED RECORD
  [[ -e "$1" ]] || unfit "$@"
}
cd '/shared/my work/runs/r1/attempt-1' || exit 69
need '/shared/my work/build/dray-cpu.sif' 'the image' '"rank": null, "code": 69, "why": "/shared/my work/build/dray-cpu.sif is not there\n  wanted: the image", "log": null, "last_lines": []'
binds=()
bind() { # PLACE ro|rw: also where a link leads to, since programs ask for a file's real path
  local place real
  real="$(realpath -- "$1"; echo .)" # the dot keeps what a line break at the end would lose
  for place in "$1" "${real%$'\n.'}"; do
    binds+=("$place"$'\t'"$2")
  done
}
bind '/shared/my work/runs/r1' rw
need /scratch 'site harbour: data lives there' '"rank": null, "code": 69, "why": "/scratch is not there\n  wanted: site harbour: data lives there", "log": null, "last_lines": []'
bind /scratch rw
# A folder before what lies in it: the last mount is the one that is seen. Who may write decides.
mounts=() last=""
while IFS= read -r -d '' entry; do
  place="${entry%$'\t'*}" quoted="${entry%$'\t'*}" mode=""
  quoted="${quoted//\"/\"\"}"
  [[ "$entry" == *$'\t'rw ]] || mode=,ro
  [[ "$place" != "$last" ]] || unset 'mounts[-1]'
  mounts+=("--mount=type=bind,\"src=$quoted\",\"dst=$quoted\"$mode")
  last="$place"
done < <(printf '%s\0' "${binds[@]}" | LC_ALL=C sort --zero-terminated --unique)

# Which image this node has: the first node holds it against its own.
DRAY_IMAGE_ID=$(od --address-radix=n --format=x1 --skip-bytes=48 --read-bytes=16 '/shared/my work/build/dray-cpu.sif' | tr --delete ' \n') || true
export DRAY_IMAGE_ID

# Known only here, so handed in as it is: who this node is, and what pass_env names.
if [[ -v SLURM_NODEID ]]; then export APPTAINERENV_SLURM_NODEID="$SLURM_NODEID"; fi
if [[ -v SLURM_STEP_NUM_NODES ]]; then export APPTAINERENV_SLURM_STEP_NUM_NODES="$SLURM_STEP_NUM_NODES"; fi
if [[ -v SLURMD_NODENAME ]]; then export APPTAINERENV_SLURMD_NODENAME="$SLURMD_NODENAME"; fi
if [[ -v SLURM_CPUS_ON_NODE ]]; then export APPTAINERENV_SLURM_CPUS_ON_NODE="$SLURM_CPUS_ON_NODE"; fi
if [[ -v DRAY_IMAGE_ID ]]; then export APPTAINERENV_DRAY_IMAGE_ID="$DRAY_IMAGE_ID"; fi

# What was compiled on this node goes when it has ended.
readonly scratch=/tmp/dray-r1
trap 'rm -rf -- "$scratch"' EXIT
# The engine has a group of its own: what this script hears (Slurm may signal it alone), it hands on, and once.
set -m
apptainer \
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
  '/shared/my work/runs/r1/attempt-1/plan.json' &
set +m
readonly engine=$!
for heard in TERM INT HUP USR1; do
  # shellcheck disable=SC2064 # now, not then
  trap "kill -$heard -- -$engine 2>/dev/null" "$heard"
done
while :; do # a signal ends the wait, and not the engine
  code=0
  wait "$engine" || code=$?
  kill -0 "$engine" 2>/dev/null || break
done
wait "$engine" || code=$?
exit "$code"
