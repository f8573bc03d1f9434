#!/usr/bin/env bash
# What this job and its first node are, as key=value lines on stdout. bash and /proc only.
# Usage: probe.sh ENGINE IMAGE SITE      (inside a job, on its first node)
set -euo pipefail

probe::listening() { # PORT: does anything on this machine listen there?
  local -r wanted="$(printf '%04X' "$1")"
  local address state
  # Columns of /proc/net/tcp: number, local address:port, remote, state (0A is LISTEN).
  while read -r _ address _ state _; do
    [[ "$state" == 0A && "${address##*:}" == "$wanted" ]] && return 0
  done < <(cat /proc/net/tcp /proc/net/tcp6 2>/dev/null)
  return 1
}

probe::free_port() { # from the job's number, so that two jobs on a node start from different ports
  local -r job="$1"
  local try port
  for ((try = 0; try < 100; try++)); do
    port=$((20000 + (job + try * 101) % 10000))
    probe::listening "$port" || { echo "$port"; return; }
  done
  echo "probe: no free port in 100 tries from 20000 up on $(</proc/sys/kernel/hostname)" >&2
  return 75
}

probe::main() {
  local -r engine="$1" image="$2" site="$3"
  local port
  port="$(probe::free_port "$SLURM_JOB_ID")"
  cat <<FACTS
scheduler=slurm
job=$SLURM_JOB_ID
nodelist=$SLURM_JOB_NODELIST
nodes=$SLURM_JOB_NUM_NODES
gpus_per_node=${SLURM_GPUS_ON_NODE:-0}
cpus_per_node=${SLURM_CPUS_ON_NODE:-1}
port=$port
engine=$engine
image=$image
site=$site
uid=$(id -u)
gid=$(id -g)
FACTS
}

probe::main "$@"
