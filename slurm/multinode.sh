#!/usr/bin/env bash
# Train a recipe on several nodes: sbatch [OPTIONS] slurm/multinode.sh RECIPE [key=value ...]
# or start a program of yours as every rank:  sbatch [OPTIONS] slurm/multinode.sh [key=value ...] -- train.py ...
# or resume a run:                           sbatch [OPTIONS] slurm/multinode.sh --run=NAME
# Options given to sbatch (--nodes, --gpus-per-node, --time, --account, --partition ...) win over these:
#SBATCH --job-name=dray
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --time=01:00:00
#SBATCH --output=dray-%j.out
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@120
set -euo pipefail

# Inside an salloc this is the checkout's own file. sbatch runs a copy from Slurm's spool: the job's record has its place.
script="$(realpath -- "${BASH_SOURCE[0]}")"
if [[ -z "${DRAY_HOME:-}" && ! -f "${script%/*}/job.sh" ]]; then
  script="$(scontrol show job "${SLURM_JOB_ID:?submit this with sbatch}" | sed -n 's/^ *Command=//p')"
  [[ "$script" == /* ]] || script="${SLURM_SUBMIT_DIR:-$PWD}/$script" # Slurm records a path as it was typed
fi
DRAY_HOME="$(realpath --canonicalize-missing --no-symlinks -- "${DRAY_HOME:-${script%%/slurm/multinode.sh*}}")"
[[ -f "$DRAY_HOME/slurm/job.sh" ]] ||
  { echo "dray: there is no checkout of dray at $DRAY_HOME: export DRAY_HOME=CHECKOUT before sbatch" >&2; exit 78; }
source "$DRAY_HOME/slurm/job.sh"
job::main "$@"
