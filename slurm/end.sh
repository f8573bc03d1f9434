#!/usr/bin/env bash
# Sourced by slurm/lib.sh: what a job does when its nodes have ended. `dray finish` in the image writes the result and
# decides what comes next, in the attempt's file `next`; Slurm's commands are here, outside.
# It uses what lib::main has set: image, attempt, given, grace_s, lost, stopped_by, stopped_at, began_at.
# shellcheck disable=SC2154

end::finish() { # CODE: result.json and the last words; without the image this script's own
  local ended=0 words
  # Slurm signals all processes of a job that is to end, and this must not.
  words="$(trap '' "${lib__signals[@]}" && end::job "$1" | plan::inside python3 -m dray finish "$attempt" --code "$1" ${stopped_by:+--stopped})" || ended=$?
  if [[ -n "$words" ]]; then
    printf '%s\n' "$words" || true # this job's output may be on a disk that is full
    end::decided || true
    return "$ended"
  fi
  (($1 == 0)) || ended="$1"
  lib::die "$ended" "the image did not start again to write down how the run ended" \
    "where:  $image on node $(</proc/sys/kernel/hostname)" \
    "found:  exit code $1 of the nodes${stopped_by:+, which SIG$stopped_by stopped}" \
    "fix:    see $attempt/failures and $attempt/logs, the first failure first"
}

end::cost() { # what the attempt had, and for how long
  local now gpus="${SLURM_GPUS_ON_NODE:-${SLURM_GPUS_PER_NODE:-0}}" # as probe.sh
  ((${#lost[@]} > 0)) || echo "first_of_job=1" # the wait in the queue was for this attempt
  lib::uptime
  echo "begun_s=$began_at ended_s=$now allocated_nodes=$SLURM_JOB_NUM_NODES allocated_gpus=${gpus##*:}"
}

end::job() { # CODE: whom to tell how it ended, what it cost, and what Slurm knows of the job; when it was asked to end
  local webhook="${DRAY_WEBHOOK_FILE:-${XDG_CONFIG_HOME:-${HOME:-}/.config}/dray/webhook}" url=""
  if [[ -f "$webhook" && -O "$webhook" ]]; then
    if [[ "$(stat --dereference --format=%a -- "$webhook")" == *00 ]]; then
      IFS= read -r url <"$webhook" || true
      [[ "$url" == *[[:cntrl:]]* ]] || echo "webhook=$url"
    else
      echo "warning: $webhook is not used: chmod 600 it, since its URL is a secret" >&2
    fi
  fi
  [[ -z "$stopped_by" ]] || echo "signal=$stopped_by at=$stopped_at end=${SLURM_JOB_END_TIME:-} restarts=${SLURM_RESTART_COUNT:-0}"
  [[ "${ENVIRONMENT:-}" != BATCH ]] || echo "BatchFlag=1" # which sbatch sets, also where the controller does not answer
  # Slurm kills this script some seconds later (KillWait): there is no time for a controller that does not answer.
  ! type -P scontrol >/dev/null || timeout 5 scontrol show job --oneliner "$(end::id)" || true
  end::cost
}

end::id() { # this job as Slurm is asked of it: the number of an array's last task is that of the array, and means all of it
  local id="$SLURM_JOB_ID"
  [[ -z "${SLURM_ARRAY_JOB_ID:-}" ]] || id="${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
  printf '%s' "$id"
}

end::decided() { # what dray finish has decided: nothing, back into the queue, or on with spare nodes (sets `lost`)
  local what nodes
  [[ -s next ]] || return 0
  read -r what nodes <next || true
  # The image may be another user's.
  [[ "$what $nodes" =~ ^(requeue|spare)( [A-Za-z0-9][A-Za-z0-9._-]*)*\ ?$ ]] || plan::unknown next "$what $nodes"
  if [[ "$what" == spare ]]; then
    read -ra nodes <<<"$nodes"
    lost+=("${nodes[@]}")
  else
    trap '' "${lib__signals[@]}"
    end::requeue "${nodes// /,}"
  fi
}

end::requeue() { # [NODE,NODE...]: this job, without these nodes
  local -r id="$(end::id)" without="${1:-}"
  local answer shown code=0 when="in two minutes at the earliest (BeginTime)"
  answer="$(timeout 20 scontrol requeue "$id" 2>&1)" || code=$?
  end::show
  if ((code == 0)); then
    [[ -z "$without" ]] || end::exclude "$without"
    [[ "$(end::field ExpeditedRequeue)" != Yes ]] || when="as soon as its nodes are free (--requeue=expedite)"
    echo "requeued: job $id goes on in this run folder; Slurm starts it $when"
  elif end::is_requeued; then
    echo "requeued: by Slurm itself; job $id goes on in this run folder"
  elif ((code == 124)) || [[ -z "$shown" ]]; then # a job beside one that was put back would do the same work
    echo "unknown whether job $id was requeued, since Slurm does not answer; look with squeue --job=$id"
  else
    echo "not requeued: $answer"
    end::follow "$without"
  fi
}

end::show() { # sets `shown`, all that Slurm says of this job; nothing where it does not answer
  shown="$(timeout 20 scontrol show job "$(end::id)" 2>/dev/null)" || true
}

end::is_requeued() { # whether the job that is `shown` is back in the queue; its state is COMPLETING until this script has ended
  [[ "$(end::field JobState)" == PENDING || "$(end::field Restarts)" -gt "${SLURM_RESTART_COUNT:-0}" ]]
}

end::stays_out() { # Slurm 26.05 would keep a job of sbatch --requeue=expedite that fails in the queue, held (REQUEUE_HOLD)
  local -r code=$?
  local shown
  ((code != 0)) && [[ "${ENVIRONMENT:-}" == BATCH ]] || return 0
  end::show
  [[ "$(end::field ExpeditedRequeue)" == Yes ]] && ! end::is_requeued || return 0
  timeout 20 scontrol update job="$(end::id)" Requeue=0 >/dev/null ||
    echo "warning: Slurm may keep this job in the queue, held: scancel $(end::id)"
}
trap end::stays_out EXIT # whatever ends this script

end::field() { # NAME: of what scontrol shows of this job; nothing where it has none
  local value=""
  [[ ! "$shown" =~ (^|[[:space:]])"$1"=([^$'\n']*) ]] || value="${BASH_REMATCH[2]}"
  value="${value%% [A-Z]*=*}" # the next field in that line; a name and a folder may have spaces
  [[ "$value" == "(null)" || "$value" == N/A ]] || printf '%s' "$value"
}

end::exclude() { # NODE,NODE...: for the next start of this job, which waits in the queue
  local -r before="$(end::field ExcNodeList)"
  timeout 20 scontrol update job="$(end::id)" ExcNodeList="${before:+$before,}$1" >/dev/null ||
    echo "warning: ExcNodeList cannot be set: Slurm may give this job $1 again"
}

end::follow() { # [NODE,NODE...]: where Slurm does not put jobs back, another one with the same options, once this one has ended
  local value option answer
  local -a words=(sbatch --parsable --dependency="afterany:$(end::id)" --nodes="$SLURM_JOB_NUM_NODES")
  for option in job-name=JobName account=Account qos=QOS partition=Partition time=TimeLimit constraint=Features \
    reservation=Reservation licenses=Licenses mem=MinMemoryNode mem-per-cpu=MinMemoryCPU cpus-per-task=CPUs/Task \
    gres=TresPerNode exclude=ExcNodeList mail-user=MailUser mail-type=MailType chdir=WorkDir output=StdOut; do
    value="$(end::field "${option#*=}")"
    case "$option" in
      gres=*) value="${value//gres\/gpu/gpu}" value="${value//gres\//}" ;;
      exclude=*) value+="${value:+${1:+,}}${1:-}" ;;
      mem*=*) [[ "$value" != 0 ]] || value="" ;; # --mem=0 would be all of it
      output=*)
        [[ -z "$value" ]] || words+=(--open-mode=append)
        # The next job is no task of an array, and would take these for other numbers.
        [[ -z "${SLURM_ARRAY_TASK_ID:-}" ]] || value="${value//%A/$SLURM_ARRAY_JOB_ID}" value="${value//%a/$SLURM_ARRAY_TASK_ID}"
        ;;
    esac
    [[ -z "$value" ]] || words+=("--${option%%=*}=$value")
  done
  [[ "$(end::field OverSubscribe)" != NO ]] || words+=(--exclusive)
  ! grep -qx -- --no-kill srun.options 2>/dev/null || words+=(--no-kill)
  [[ -z "$grace_s" ]] || words+=("--signal=B:USR1@$grace_s") # which scontrol does not tell
  local script=multinode
  ((SLURM_JOB_NUM_NODES > 1)) || script=singlenode
  words+=("$DRAY_HOME/slurm/$script.sh" --run="${attempt%/*}" "${given[@]}")
  # Where this job was submitted: a command's own files are looked for there.
  if answer="$(cd -- "${SLURM_SUBMIT_DIR:-.}" && timeout 20 "${words[@]}" 2>&1)"; then
    echo "follow-on: job ${answer%%;*} goes on in this run folder once this one has ended"
  else
    echo "not submitted: $answer"
    printf '  fix:    %s\n' "type this on a login node:${SLURM_SUBMIT_DIR:+ cd $(printf '%q' "$SLURM_SUBMIT_DIR") &&}$(printf ' %q' "${words[@]}")"
  fi
}
