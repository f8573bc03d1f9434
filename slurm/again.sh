#!/usr/bin/env bash
# Sourced by slurm/lib.sh: what becomes of a job whose run is not at its end. `dray finish` in the image has decided it
# and left it in the attempt's file `next`; Slurm's commands are here, outside.

again::requeue() { # what dray finish has decided: this job goes back into the queue, without a node that is unfit
  local what node id="$SLURM_JOB_ID" answer
  [[ -s next ]] || return 0
  read -r what node <next || true
  lib::known decision "$what" requeue
  [[ -z "$node" || "$node" =~ ^[A-Za-z0-9][A-Za-z0-9._-]*$ ]] || lib::known node "$node" "a host's name"
  # The number of an array's last task is that of the array, and would put all of it back.
  [[ -z "${SLURM_ARRAY_JOB_ID:-}" ]] || id="${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
  if answer="$(timeout 20 scontrol requeue "$id" 2>&1)"; then
    [[ -z "$node" ]] || again::exclude "$id" "$node"
    echo "requeued: job $id goes on in this run folder; Slurm starts it in two minutes at the earliest (BeginTime)"
    return
  fi
  local shown
  shown="$(timeout 20 scontrol show job "$id" 2>/dev/null)" || true
  if [[ "$(again::field JobState)" == PENDING || "$(again::field Restarts)" -gt "${SLURM_RESTART_COUNT:-0}" ]]; then
    echo "requeued: by Slurm itself; job $id goes on in this run folder"
  else
    echo "not requeued: $answer"
    again::follow "$node"
  fi
}

again::field() { # NAME: of what scontrol shows of this job; nothing where it has none
  local value=""
  [[ ! "$shown" =~ (^|[[:space:]])"$1"=([^$'\n']*) ]] || value="${BASH_REMATCH[2]}"
  value="${value%% [A-Z]*=*}" # the next field in that line; a name and a folder may have spaces
  [[ "$value" == "(null)" || "$value" == N/A ]] || printf '%s' "$value"
}

again::exclude() { # ID NODE: for the next start of a job that waits in the queue
  local shown before
  shown="$(timeout 20 scontrol show job "$1" 2>/dev/null)" || true
  before="$(again::field ExcNodeList)"
  timeout 20 scontrol update job="$1" ExcNodeList="${before:+$before,}$2" >/dev/null ||
    echo "warning: Slurm may give this job the unfit node $2 again"
}

again::follow() { # [NODE]: where Slurm does not put jobs back, another one with the same options, once this one has ended
  local value option answer
  local -a words=(sbatch --parsable --dependency="afterany:$SLURM_JOB_ID" --nodes="$SLURM_JOB_NUM_NODES")
  for option in job-name=JobName account=Account qos=QOS partition=Partition time=TimeLimit constraint=Features \
    reservation=Reservation licenses=Licenses mem=MinMemoryNode mem-per-cpu=MinMemoryCPU cpus-per-task=CPUs/Task \
    gres=TresPerNode exclude=ExcNodeList mail-user=MailUser mail-type=MailType chdir=WorkDir output=StdOut; do
    value="$(again::field "${option#*=}")"
    case "$option" in
      gres=*) value="${value//gres\/gpu/gpu}" value="${value//gres\//}" ;;
      exclude=*) value+="${value:+${1:+,}}${1:-}" ;;
      mem*=*) [[ "$value" != 0 ]] || value="" ;; # --mem=0 would be all of it
      output=*) [[ -z "$value" ]] || words+=(--open-mode=append) ;;
    esac
    [[ -z "$value" ]] || words+=("--${option%%=*}=$value")
  done
  [[ "$(again::field OverSubscribe)" != NO ]] || words+=(--exclusive)
  local script=multinode
  ((SLURM_JOB_NUM_NODES > 1)) || script=singlenode
  words+=("$DRAY_HOME/slurm/$script.sh" --run="${attempt%/*}" "${given[@]}")
  if answer="$(timeout 20 "${words[@]}" 2>&1)"; then
    echo "follow-on: job ${answer%%;*} goes on in this run folder once this one has ended"
  else
    echo "not submitted: $answer"
    printf '  fix:    %s\n' "type this on a login node:$(printf ' %q' "${words[@]}")"
  fi
}
