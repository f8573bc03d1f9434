#!/usr/bin/env bash
# What this job and its first node are, as key=value lines on stdout. bash and /proc only.
# Usage: probe.sh ENGINE IMAGE SITE [VARIABLE|PATH...]     (inside a job, on its first node)
set -euo pipefail

probe::shell() { # [VARIABLE...]: the names of this environment; values only of libraries' variables, and of those that are asked for
  # Where bash traces (SHELLOPTS=xtrace), the job's output would have the values.
  { local -; set +x; } 2>/dev/null
  local entry name asked=" $* "
  local -r libraries='NCCL|RCCL|FI|UCX|GLOO|HSA|HIP|ROCR|CUDA|MIOPEN|OMP|KMP|MKL|TORCH|PYTORCH|TRITON|HF|WANDB|DS|ACCELERATE'
  local -r secret='_(KEY|PAT|AUTH|COOKIE|CREDENTIALS?|SECRETS|PASSPHRASE)_|(TOKEN|PASSWORD|PASSWD|PASS|SECRET|APIKEY|WEBHOOK)_'
  while IFS= read -r -d '' entry; do
    name="${entry%%=*}"
    [[ "$entry" != *[[:cntrl:]]* ]] || continue
    # Of what may be a secret the planner, which is in the image, gets the name alone.
    if [[ "_${name^^}_" =~ $secret || "$entry" == *://*@* ]]; then
      printf 'shell.%s=(set)\n' "$name"
      continue
    fi
    [[ "$asked" != *" $name "* ]] || printf 'variable.%s\n' "$entry"
    [[ "$name" =~ ^($libraries)_ || "$name" == XDG_CACHE_HOME || "$name" == MPLCONFIGDIR ]] || entry="$name=(set)"
    printf 'shell.%s\n' "$entry"
  done <"/proc/$$/environ"
}

probe::main() {
  local -r engine="$1" image="$2" site="$3"
  # An salloc's own shell has only the second, which may name the kind: a100:4.
  local -r gpus="${SLURM_GPUS_ON_NODE:-${SLURM_GPUS_PER_NODE:-0}}"
  cat <<FACTS
scheduler=slurm
job=$SLURM_JOB_ID
task=${SLURM_ARRAY_TASK_ID:+${SLURM_ARRAY_JOB_ID:-}_$SLURM_ARRAY_TASK_ID}
restarts=${SLURM_RESTART_COUNT:-0}
nodelist=$SLURM_JOB_NODELIST
nodes=$SLURM_JOB_NUM_NODES
gpus_per_node=${gpus##*:}
hf_home=$([[ "${HF_HOME:-}" == /* && -d "$HF_HOME" ]] && echo "$HF_HOME")
engine=$engine
image=$image
image_sha256=$(sed -n 's/.*"sha256": *"\([0-9a-f]*\)".*/\1/p' "$image.json" 2>/dev/null || true)
site=$site
cluster=${SLURM_CLUSTER_NAME:-}
home=${HOME:-}
uid=$(id -u)
gid=$(id -g)
FACTS
  local word
  for word in "${@:4}"; do
    [[ "$word" != /* ]] || printf 'path.%s=%s\n' "$word" "$([[ -e "$word" ]] && echo there || echo absent)"
  done
  probe::shell "${@:4}"
}

probe::main "$@"
