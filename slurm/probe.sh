#!/usr/bin/env bash
# What this job and its first node are, as key=value lines on stdout. bash and /proc only.
# Usage: probe.sh ENGINE IMAGE SITE     (inside a job, on its first node)
set -euo pipefail

probe::shell() { # this environment: the planner takes from it what the site and the recipe name
  local entry name
  local -r secret='TOKEN|SECRETS?|PASSWORD|PASSWD|PASSPHRASE|PASS|KEY|PAT|AUTH|COOKIE|WEBHOOK|CREDENTIALS?'
  while IFS= read -r -d '' entry; do
    name="${entry%%=*}"
    [[ "$entry" != *[[:cntrl:]]* ]] || continue
    # Of what may be a secret the planner, which is in the image, gets the name alone.
    [[ ! "_${name^^}_" =~ ($secret)_ && "$entry" != *://*@* ]] || entry="$name=(set)"
    printf 'shell.%s\n' "$entry"
  done <"/proc/$$/environ"
}

probe::main() {
  local -r engine="$1" image="$2" site="$3"
  # An salloc's own shell has only the second, which may name the kind: a100:4.
  local -r gpus="${SLURM_GPUS_ON_NODE:-${SLURM_GPUS_PER_NODE:-0}}"
  local hf_home=""
  # What is not there yet, libraries make; a container could not have it bound.
  [[ "${HF_HOME:-}" != /* || ! -d "$HF_HOME" ]] || hf_home="$HF_HOME"
  cat <<FACTS
scheduler=slurm
job=$SLURM_JOB_ID
restarts=${SLURM_RESTART_COUNT:-0}
nodelist=$SLURM_JOB_NODELIST
nodes=$SLURM_JOB_NUM_NODES
gpus_per_node=${gpus##*:}
hf_home=$hf_home
engine=$engine
image=$image
image_sha256=$(sed -n 's/.*"sha256": *"\([0-9a-f]*\)".*/\1/p' "$image.json" 2>/dev/null || true)
site=$site
cluster=${SLURM_CLUSTER_NAME:-}
home=${HOME:-}
uid=$(id -u)
gid=$(id -g)
FACTS
  probe::shell
}

probe::main "$@"
