#!/usr/bin/env bash
# Sourced by slurm/lib.sh: Slurm's own sbcast brings the image to the disks of all nodes, before they start. The planner has
# written stage.sh, which one task on each node runs meanwhile. Where it does not come this way, node.sh brings it.
# It uses what lib::main has set: image, stopped_by; it stands in the attempt's folder.
# shellcheck disable=SC2154,SC2034

readonly stage__answer_s=120 stage__sbcast_s=900 stage__end_s=30

stage::nodes() { # by sbcast, where the plan says so and every node is free to take the image; sets `staged` if all have it
  [[ -f stage.sh ]] || return 0
  if ! type -P sbcast >/dev/null; then
    echo "image: not copied by sbcast: sbcast is not on the PATH of node $(</proc/sys/kernel/hostname)"
    return 0
  fi
  local pipes from to step code=0
  if ! pipes="$(mktemp --directory)" || ! mkfifo -- "$pipes/to" "$pipes/from"; then
    echo "image: not copied by sbcast: no pipe can be made on node $(</proc/sys/kernel/hostname)"
    return 0
  fi
  # srun hands each line to all tasks. --wait=0: those that end first do not end the others.
  srun --overlap --export=ALL --wait=0 --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 \
    --cpu-bind=none bash -c "$lib__task" "$attempt" ./stage.sh <"$pipes/to" >"$pipes/from" 2>logs/stage.log &
  step=$!
  exec {to}>"$pipes/to" {from}<"$pipes/from"
  rm --recursive --force -- "$pipes"
  stage::bring || code=$?
  exec {to}>&-
  ((code == 0)) || kill -TERM "$step" 2>/dev/null || true
  # srun ends after its tasks. One on a disk that hangs ends by no signal; the rendezvous then names its node.
  code=0
  while IFS= read -r -t "$stage__end_s" -u "$from" || { code=$?; false; }; do :; done
  ((code <= 128)) || kill -KILL "$step" 2>/dev/null || true
  wait "$step" 2>/dev/null || true
  exec {from}<&-
}

stage::bring() { # fails where a task does not answer, or has to be ended
  local -A answers=()
  local part began=$SECONDS code=0
  if ! stage::ask "$stage__answer_s"; then
    stage::without "not all nodes answered"
    return 1
  fi
  if ((${answers[there]:-0} == SLURM_JOB_NUM_NODES)); then
    staged=1
    return 0
  fi
  part="${!answers[*]}"
  if [[ "$part" != "free /"*"/dray-images-$UID/"*.sif.part ]] || ((${#answers[@]} != 1)); then
    stage::without "$(stage::counted)"
    return 0
  fi
  part="${part#free }"
  stage::sbcast || code=$?
  if ((code != 0)); then
    stage::without "sbcast ended with $code: $(tail --lines=1 logs/sbcast.log)"
    return 0
  fi
  # In a process of its own, which alone dies where srun has gone.
  (echo sent >&"$to") 2>/dev/null || true
  if ! stage::ask "$stage__sbcast_s" || ((${answers[there]:-0} != SLURM_JOB_NUM_NODES)); then
    stage::without "after sbcast $(stage::counted)"
    return 1
  fi
  staged=1
  echo "image: sbcast has copied it to $SLURM_JOB_NUM_NODES nodes in $((SECONDS - began)) s"
}

stage::ask() { # SECONDS: fills `answers`, by what how many nodes say; fails where not all do in time
  local line count
  local -r until=$((SECONDS + $1))
  answers=()
  for ((count = 0; count < SLURM_JOB_NUM_NODES; count++)); do
    ((SECONDS < until)) && IFS= read -r -t "$((until - SECONDS))" -u "$from" line || return 1
    line="${line:-nothing}"
    answers["$line"]=$((${answers["$line"]:-0} + 1))
  done
}

stage::sbcast() { # a signal ends it at once: the run is to end
  local pid code=0
  timeout "$stage__sbcast_s" sbcast "$image" "$part" >logs/sbcast.log 2>&1 &
  pid=$!
  while kill -0 "$pid" 2>/dev/null; do
    wait "$pid" || true
    [[ -z "$stopped_by" ]] || kill -TERM "$pid" 2>/dev/null || true
  done
  wait "$pid" || code=$?
  return "$code"
}

stage::counted() { # what the nodes say, in words
  local -A meant=([there]="have the image" [busy]="are getting it for another job" [full]="have no room for it"
    [none]="have no folder for it" [differs]="got another file")
  local answer text=""
  for answer in there busy full none differs; do
    [[ -z "${answers[$answer]:-}" ]] || text+="${text:+, }${answers[$answer]} of $SLURM_JOB_NUM_NODES nodes ${meant[$answer]}"
  done
  printf '%s' "${text:-the nodes give different answers}"
}

stage::without() { # WHY
  echo "image: not copied by sbcast: $1; see logs/stage.log"
}
