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
# dray: tuning is kept with the compiled kernels for the next attempt
export TRITON_CACHE_AUTOTUNING=1
# dray: compile caches race on a shared disk
export TRITON_CACHE_DIR=/tmp/dray-7-r/triton
# dray: Triton's other folders, which are in the home by default
export TRITON_HOME=/tmp/dray-7-r

export DRAY_STARTED="$started"

cd '/shared/my work/runs/r1/attempt-1'

exec /home/me/.venv/bin/python \
  -m \
  dray.runner \
  '/shared/my work/runs/r1/attempt-1/plan.json'
