#!/usr/bin/env bash
# Sourced by slurm/job.sh: what a job does when its nodes have ended. `dray finish` in the image writes the result and
# decides what comes next, in the attempt's file `next`; Slurm's commands are here, outside.
# It uses what job::main has set: image, attempt, given, lost, stopped_by, stopped_at, began_at.
# shellcheck disable=SC2154

# The options of sbatch that src/dray/runs/finish.py writes.
readonly end__option='^--(exclusive|no-kill|open-mode=append|signal=B:USR1@[0-9]+|(job-name|account|qos|partition|time|constraint|reservation|licenses|mem|mem-per-cpu|cpus-per-task|gres|exclude|mail-user|mail-type|chdir|output)=[^[:cntrl:]]+)$'

end::finish() { # CODE: result.json and the last words; without the image this script's own
  local ended=0 words webhook="${DRAY_WEBHOOK_FILE:-${XDG_CONFIG_HOME:-${HOME:-}/.config}/dray/webhook}"
  [[ -f "$webhook" ]] || webhook=""
  # Slurm signals all processes of a job that is to end, and this must not.
  words="$(trap '' "${job__signals[@]}" && end::job | plan::inside python3 -m dray finish "$attempt" --code "$1" \
    ${stopped_by:+--stopped} ${webhook:+--webhook "$webhook"})" || ended=$?
  if [[ -n "$words" ]]; then
    printf '%s\n' "$words" || true # this job's output may be on a disk that is full
    end::decided || true
    return "$ended"
  fi
  (($1 == 0)) || ended="$1"
  job::die "$ended" "the image did not start again to write down how the run ended" "where:  $image on node $(</proc/sys/kernel/hostname)" \
    "found:  exit code $1 of the nodes${stopped_by:+, which SIG$stopped_by stopped}" \
    "fix:    see $attempt/failures and $attempt/logs, the first failure first"
}

end::job() { # what Slurm knows of the job, what asked it to end and when, and what it cost
  [[ -z "$stopped_by" ]] || echo "signal=$stopped_by at=$stopped_at end=${SLURM_JOB_END_TIME:-} restarts=${SLURM_RESTART_COUNT:-0}"
  [[ "${ENVIRONMENT:-}" != BATCH ]] || echo "BatchFlag=1" # which sbatch sets, also where the controller does not answer
  # Slurm kills this script some seconds later (KillWait): there is no time for a controller that does not answer.
  ! type -P scontrol >/dev/null || timeout 5 scontrol show job --oneliner "$(end::id)" || true
  end::cost
}

end::cost() { # what the attempt had, and for how long
  local now gpus="${SLURM_GPUS_ON_NODE:-${SLURM_GPUS_PER_NODE:-0}}" # as probe.sh
  ((${#lost[@]} > 0)) || echo "first_of_job=1" # the wait in the queue was for this attempt
  read -r now _ </proc/uptime
  echo "begun_s=$began_at ended_s=$now allocated_nodes=$SLURM_JOB_NUM_NODES allocated_gpus=${gpus##*:}"
}

end::id() { # this job as Slurm is asked of it: the number of an array's last task is that of the array, and means all of it
  printf '%s' "${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_}${SLURM_ARRAY_TASK_ID:-$SLURM_JOB_ID}"
}

end::decided() { # what dray finish has decided: nothing, on with spare nodes (sets `lost`), or back into the queue
  local what nodes option
  local -a options
  [[ -s next ]] || return 0
  mapfile -t options <next
  read -r what nodes <<<"${options[0]}"
  # The image may be another user's.
  [[ "$what $nodes" =~ ^(requeue|spare)( [A-Za-z0-9][A-Za-z0-9._-]*)*\ ?$ ]] || plan::unknown next "$what $nodes"
  for option in "${options[@]:1}"; do
    [[ "$option" =~ $end__option ]] || plan::unknown next "$option"
  done
  read -ra nodes <<<"$nodes"
  if [[ "$what" == spare ]]; then
    lost+=("${nodes[@]}")
  else
    trap '' "${job__signals[@]}"
    end::requeue "${options[@]:1}"
  fi
}

end::requeue() { # OPTION...: this job; where Slurm does not put it back, another one with these options of sbatch
  local -r id="$(end::id)"
  local answer shown code=0 when="in two minutes at the earliest (BeginTime)"
  answer="$(timeout 20 scontrol requeue "$id" 2>&1)" || code=$?
  shown="$(timeout 20 scontrol show job "$id" 2>/dev/null)" || true
  if ((code == 0)); then
    end::leave_out "$@"
    [[ "$shown" != *ExpeditedRequeue=Yes* ]] || when="as soon as its nodes are free (--requeue=expedite)"
    echo "requeued: job $id goes on in this run folder; Slurm starts it $when"
  elif end::is_requeued; then
    end::leave_out "$@"
    echo "requeued: by Slurm itself; job $id goes on in this run folder"
  elif ((code == 124 || $# == 0)) || [[ -z "$shown" ]]; then # a job beside one that was put back would do the same work
    echo "unknown whether job $id was requeued, since Slurm does not answer; look with squeue --job=$id"
  else
    echo "not requeued: $answer"
    end::follow "$@"
  fi
}

end::leave_out() { # OPTION...: the unfit `nodes`, at the job's next start. There are no options where scontrol answers only now
  local option exclude="${nodes[*]-}"
  [[ -n "$exclude" ]] || return 0
  [[ ! "$shown" =~ ExcNodeList=([[:alnum:]][^[:space:]]*) ]] || exclude="${BASH_REMATCH[1]} $exclude"
  for option in "$@"; do
    [[ "$option" != --exclude=* ]] || exclude="${option#*=}"
  done
  # Nodes that the user has left out must not come back.
  [[ -n "$shown$*" ]] && timeout 20 scontrol update job="$id" ExcNodeList="${exclude// /,}" >/dev/null ||
    echo "warning: ExcNodeList cannot be set: Slurm may give this job the same nodes again"
}

end::is_requeued() { # whether the job that is `shown` is back in the queue; its state is COMPLETING until this script has ended
  local restarts=0
  [[ ! "$shown" =~ Restarts=([0-9]+) ]] || restarts="${BASH_REMATCH[1]}"
  [[ "$shown" == *JobState=PENDING* ]] || ((restarts > ${SLURM_RESTART_COUNT:-0}))
}

end::stays_out() { # Slurm 26.05 would keep a job of sbatch --requeue=expedite that fails in the queue, held (REQUEUE_HOLD)
  local -r code=$?
  local shown
  ((code != 0)) && [[ "${ENVIRONMENT:-}" == BATCH ]] || return 0
  shown="$(timeout 20 scontrol show job "$(end::id)" 2>/dev/null)" || true
  [[ "$shown" == *ExpeditedRequeue=Yes* ]] && ! end::is_requeued || return 0
  timeout 20 scontrol update job="$(end::id)" Requeue=0 >/dev/null ||
    echo "warning: Slurm may keep this job in the queue, held: scancel $(end::id)"
}
trap end::stays_out EXIT # whatever ends this script

end::follow() { # OPTION...: another job, once this one has ended
  local answer
  local -ra words=(sbatch --parsable --dependency="afterany:$(end::id)" --nodes="$SLURM_JOB_NUM_NODES" "$@"
    "$DRAY_HOME/slurm/multinode.sh" --run="${attempt%/*}" "${given[@]}")
  # Where this job was submitted: a command's own files are looked for there.
  if answer="$(cd -- "${SLURM_SUBMIT_DIR:-.}" && timeout 20 "${words[@]}" 2>&1)"; then
    [[ ! $'\n'"$answer" =~ $'\n'([0-9]+)(;[^$'\n']*)?($'\n'|$) ]] || answer="${BASH_REMATCH[1]}" # a site's may print more
    echo "follow-on: job $answer goes on in this run folder once this one has ended"
  else
    echo "not submitted: $answer"
    printf '  fix:    %s\n' "type this on a login node:${SLURM_SUBMIT_DIR:+ cd $(printf '%q' "$SLURM_SUBMIT_DIR") &&}$(printf ' %q' "${words[@]}")"
  fi
}
